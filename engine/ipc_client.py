"""API process: the client of a core in a process of its own, over two ipc sockets."""

import multiprocessing
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from octavo.engine.core_process import Core, CoreAddresses, run_core_process
from octavo.engine.messages import (
    CoreDied,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreReply,
    Shutdown,
)
from octavo.errors import ConfigError, EngineDeadError

SHUTDOWN_TIMEOUT_S = 5.0
"""How long a core may take to free its device before it is killed."""
EXIT_STATUS_TIMEOUT_S = 1.0
"""How long the kernel may take to tell the exit status of a process whose end was seen."""
LAST_REPLY_TIMEOUT_MS = 100
"""How long zmq's I/O thread may take to hand over what a process sent before its end was seen."""


class IpcClient:
    """Starts an engine-core process and talks to it.

    Owns the process, the sockets and their folder. ``send`` and ``receive`` may be called from two
    threads. The process is spawned, so ``create_core`` must be importable there.
    """

    info: CoreInfo

    def __init__(self, create_core: Callable[[], Core]) -> None:
        addresses = CoreAddresses(tempfile.mkdtemp(prefix="octavo-"))
        self._folder = addresses.folder
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox.set_hwm(0)
        self._outbox.connect(addresses.to_core)
        self._inbox.bind(addresses.from_core)
        self._is_ready = False
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreReply)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_core_process, args=(create_core, addresses), name="octavo-core"
        )
        self._process.start()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._process.sentinel, zmq.POLLIN)

    @property
    def pid(self) -> int | None:
        """Id of the core's process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the core has its model and its KV pool; then ``info`` is set.

        Raises:
            ConfigError: a setting or the model cannot be used.
            EngineDeadError: the process ended.
        """
        reply = self._receive_reply()
        assert isinstance(reply, CoreInfo), f"the first reply of a core is {reply}"
        self.info = reply
        self._is_ready = True

    def send(self, messages: Sequence[CoreMessage | Shutdown]) -> None:
        """Hand over messages; returns at once.

        Raises:
            EngineDeadError: the core has died.
        """
        with self._send_lock:
            if self._outbox.closed or not self._process.is_alive():
                raise EngineDeadError(self._describe_death())
            self._outbox.send(self._encoder.encode(messages))

    def receive(self) -> CoreOutputs:
        """Return what the next step produced; blocks while the core has nothing to report.

        Raises:
            EngineDeadError: the core has died or was shut down.
        """
        reply = self._receive_reply()
        assert isinstance(reply, CoreOutputs), f"expected the outputs of a step, got {reply}"
        return reply

    def shutdown(self) -> None:
        """Stop the process, by force if it does not answer, and remove the sockets.

        May be called again, and from another thread than the one in ``receive``.
        """
        if self._is_ready and self._process.is_alive():
            with suppress(EngineDeadError):  # it died just now
                self.send([Shutdown()])
            self._process.join(SHUTDOWN_TIMEOUT_S)
        self.kill()
        with self._send_lock, self._receive_lock:  # a blocked ``receive`` has seen the death
            self._outbox.close(linger=0)
            self._inbox.close(linger=0)
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _receive_reply(self) -> CoreInfo | CoreOutputs:
        with self._receive_lock:
            if self._inbox.closed:
                raise EngineDeadError(self._describe_death())
            # What the core sent before it died is read first.
            is_here = self._inbox in dict(self._poller.poll())
            if not is_here and not self._inbox.poll(LAST_REPLY_TIMEOUT_MS):
                raise EngineDeadError(self._describe_death())
            reply = self._decoder.decode(self._inbox.recv())
        if isinstance(reply, CoreDied):
            raise (
                ConfigError(reply.message)
                if reply.is_config_error
                else EngineDeadError(reply.message)
            )
        return reply

    def _describe_death(self) -> str:
        self._process.join(EXIT_STATUS_TIMEOUT_S)
        return f"the engine core process ended with status {self._process.exitcode}"
