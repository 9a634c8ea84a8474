"""API process and engine-core process: whole messages over one stream socket."""

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

LENGTH = struct.Struct("<I")
"""Stands in front of every message."""
MAX_RECEIVED_BYTES = 2**18
"""Taken in at once; what is behind it waits for the next call."""


class Channel:
    """One end of a connected socket, which it owns.

    What the kernel does not take of a message is kept and leaves later, so that a sender never
    waits for the other process to read.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return what an event loop waits on."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while ``flush`` has something to do when the socket is writable."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or keep what does not leave now.

        Raises:
            EOFError: the connection is closed, by whomever.
        """
        self._unsent += LENGTH.pack(len(message))
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Send as much of what was kept as the kernel takes; raises as ``send`` does."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise EOFError("the connection is closed") from error

    def receive(self) -> list[bytes]:
        """Return the messages that are complete, in order, without waiting for one.

        Raises:
            EOFError: the connection is closed, and all that the other end sent has been returned.
        """
        try:
            data = self._socket.recv(MAX_RECEIVED_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError("the connection is closed") from error
        if not data:
            raise EOFError("the connection is closed")
        self._received += data
        return list(self._take_complete())

    def wait(self) -> None:
        """Block until something comes or something that was kept can leave, and let it leave.

        The end of the connection comes like a message: ``receive`` tells of it.
        """
        poller = select.poll()
        poller.register(self, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.poll()
        with suppress(EOFError):
            self.flush()

    def close(self, *, delivery_timeout_s: float = 0.0) -> None:
        """Close; what was kept has this long to leave."""
        with suppress(OSError):
            self._socket.settimeout(delivery_timeout_s)
            self._socket.sendall(self._unsent)
        self._socket.close()

    def _take_complete(self) -> Iterator[bytes]:
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if len(self._received) < end:
                return
            yield bytes(self._received[LENGTH.size : end])
            del self._received[:end]
