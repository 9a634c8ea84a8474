"""API process: the client of a core in a process of its own, over one socket that has no name."""

import asyncio
import multiprocessing
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from octavo.engine.channel import Channel
from octavo.engine.core_process import Core, run_core_process
from octavo.engine.messages import CoreDied, CoreInfo, CoreMessage, CoreOutputs, CoreReply
from octavo.errors import ConfigError, EngineDeadError

SHUTDOWN_TIMEOUT_S = 5.0
"""How long a core may take to free its device before it is killed."""
EXIT_STATUS_TIMEOUT_S = 1.0
"""How long the kernel may take to tell the exit status of a process whose end was seen."""


class IpcClient:
    """Starts an engine-core process and talks to it.

    Owns the process and this end of the socket between the two. Replies come through ``receive``
    or, from ``listen`` on, through call-backs; then everything but ``shutdown`` belongs on that
    event loop. The process is spawned, so ``create_core`` must be importable there.
    """

    info: CoreInfo

    def __init__(self, create_core: Callable[[], Core]) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._replies: deque[CoreReply] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreReply)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: Callable[[CoreOutputs], None]
        self._on_death: Callable[[str], None]
        self._is_ready = False
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_core_process, args=(create_core, theirs), name="octavo-core"
        )
        with theirs:  # only the core may hold this end: it closes with the core
            self._process.start()

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
        reply = _check(self._wait_for_reply())
        assert isinstance(reply, CoreInfo), f"the first reply of a core is {reply}"
        self.info = reply
        self._is_ready = True

    def send(self, messages: Sequence[CoreMessage]) -> None:
        """Hand over messages; returns at once.

        Raises:
            EngineDeadError: the core has died or was shut down.
        """
        try:
            self._channel.send(self._encoder.encode(messages))
        except EOFError:
            raise EngineDeadError(self._describe_death()) from None
        if self._loop is not None and self._channel.has_unsent:
            self._loop.add_writer(self._channel, self._flush)

    def receive(self) -> CoreOutputs:
        """Return what the next step produced; blocks while the core has nothing to report.

        Raises:
            EngineDeadError: the core has died or was shut down.
        """
        return _check_outputs(self._wait_for_reply())

    def listen(
        self, on_outputs: Callable[[CoreOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        """Call back on the running event loop from now on: with every message, then with the end.

        ``on_outputs`` must not raise.
        """
        self._on_outputs, self._on_death = on_outputs, on_death
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._read)

    def hang_up(self) -> None:
        """End the conversation: no call-back comes any more, and the core ends.

        Belongs on the event loop that listens, if one does.
        """
        if self._loop is not None:
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            self._loop = None
        self._channel.close()

    def shutdown(self) -> None:
        """Hang up unless that has been done, and wait for the process; end it by force if need be.

        May be called again, and then from any thread.
        """
        self.hang_up()
        if self._is_ready:
            self._process.join(SHUTDOWN_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _wait_for_reply(self) -> CoreReply:
        while not self._replies:
            self._replies += self._take_replies()
            if not self._replies:
                self._channel.wait()
        return self._replies.popleft()

    def _read(self) -> None:
        try:
            for reply in self._take_replies():
                self._on_outputs(_check_outputs(reply))
        except EngineDeadError as death:
            self.hang_up()
            self._on_death(str(death))

    def _flush(self) -> None:
        assert self._loop is not None, "nobody listens"
        with suppress(EOFError):  # the reader is told the same
            self._channel.flush()
            if self._channel.has_unsent:
                return
        self._loop.remove_writer(self._channel)

    def _take_replies(self) -> list[CoreReply]:
        """Return what has come, without waiting."""
        try:
            return [self._decoder.decode(packed) for packed in self._channel.receive()]
        except EOFError:
            raise EngineDeadError(self._describe_death()) from None
        except msgspec.DecodeError as error:
            raise EngineDeadError(f"a message of the core cannot be read: {error}") from error

    def _describe_death(self) -> str:
        self._process.join(EXIT_STATUS_TIMEOUT_S)
        return f"the engine core process ended with status {self._process.exitcode}"


def _check(reply: CoreReply) -> CoreInfo | CoreOutputs:
    if isinstance(reply, CoreDied):
        error_type = ConfigError if reply.is_config_error else EngineDeadError
        raise error_type(reply.message)
    return reply


def _check_outputs(reply: CoreReply) -> CoreOutputs:
    reply = _check(reply)
    assert isinstance(reply, CoreOutputs), f"expected the outputs of a step, got {reply}"
    return reply
