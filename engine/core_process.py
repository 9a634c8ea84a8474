"""Engine-core process: its main loop, its socket, and its watch over the API process.

The core plans and computes; this file moves messages. It blocks while there is nothing to do.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import wait
from typing import Protocol

import msgspec

from octavo.engine.channel import Channel
from octavo.engine.messages import CoreDied, CoreInfo, CoreMessage, CoreOutputs, CoreReply
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S = 1.0
"""How long the last replies of a core may take to leave the process."""


class Core(Protocol):
    """What the main loop needs of an engine core."""

    @property
    def info(self) -> CoreInfo:
        """Limits of the engine."""

    @property
    def has_work(self) -> bool:
        """True while there is something to plan or a result to wait for."""

    def apply(self, messages: Sequence[CoreMessage]) -> None:
        """Take in messages, in order."""

    def step(self) -> CoreOutputs | None:
        """Plan and launch a step, or wait for one; None when there is nothing to report."""

    def prepare(self) -> bool:
        """Do a little of what later steps will need; False when nothing is left to do."""

    def shutdown(self) -> None:
        """Free the device."""


def run_core_process(create_core: Callable[[], Core], end: socket.socket) -> None:
    """Be the engine-core process until the API process hangs up; exits with 1 if the core died.

    Ctrl-C and a service manager's SIGTERM reach every process of the group. The API process
    decides what they mean (a drain, an end), so they are ignored here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    with closing(CoreChannel(end)) as channel, ExitStack() as owned, death_reported(channel):
        core = create_core()
        owned.callback(core.shutdown)  # after the report: it may fail or hang on a broken device
        serve_core(core, channel)


def serve_core(core: Core, channel: "CoreChannel") -> None:
    """Announce the core and answer messages until the API process hangs up."""
    channel.send(core.info)
    while (messages := channel.receive(block=not (core.has_work or core.prepare()))) is not None:
        core.apply(messages)
        outputs = core.step()
        if outputs is not None:
            channel.send(outputs)


@contextmanager
def death_reported(channel: "CoreChannel") -> Iterator[None]:
    """Tell the API process why the core died, then end this process with status 1."""
    try:
        yield
    except ConfigError as error:
        channel.send(CoreDied(str(error), is_config_error=True))
        raise SystemExit(1) from None
    except Exception as error:  # the process's border: the API process is told why
        logger.exception("the engine core died")
        channel.send(CoreDied(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


class CoreChannel:
    """The core's end of the socket; typed msgpack in both directions."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[CoreMessage])

    def receive(self, *, block: bool) -> list[CoreMessage] | None:
        """Return the messages that have arrived, in order; ``block`` waits for the first.

        None says that the API process has hung up.
        """
        try:
            packed = self._channel.receive()
            while block and not packed:
                self._channel.wait()
                packed = self._channel.receive()
        except EOFError:
            return None
        return [message for part in packed for message in self._decoder.decode(part)]

    def send(self, reply: CoreReply) -> None:
        """Send a reply, or keep it until the API process has read others."""
        with suppress(EOFError):  # nobody hears it; the next ``receive`` says so
            self._channel.send(self._encoder.encode(reply))

    def close(self) -> None:
        """Deliver what was kept and close."""
        self._channel.close(delivery_timeout_s=DELIVERY_TIMEOUT_S)


def _exit_with_parent() -> None:
    """End this process when the one that started it is gone, whatever the main loop is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child process"
    wait([parent.sentinel])
    os._exit(1)
