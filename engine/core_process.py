"""Engine-core process: its main loop, its two sockets, and its watch over the API process.

The core plans and computes; this file moves messages. It blocks while there is nothing to do.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol

import msgspec
import zmq

from octavo.engine.messages import (
    CoreDied,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreReply,
    Shutdown,
)
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_MS = 1_000
"""How long the last reply of a core may take to leave the process."""


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

    def shutdown(self) -> None:
        """Free the device."""


@dataclass(frozen=True, slots=True)
class CoreAddresses:
    """Where the two processes meet: ipc endpoints in a folder that only this user may enter.

    The receiver binds and the sender connects: a socket that connects has a queue whether or not
    its peer is there, so a sender never blocks.
    """

    folder: str

    @property
    def to_core(self) -> str:
        """Bound by the core."""
        return f"ipc://{self.folder}/to"

    @property
    def from_core(self) -> str:
        """Bound by the API process."""
        return f"ipc://{self.folder}/from"


def run_core_process(create_core: Callable[[], Core], addresses: CoreAddresses) -> None:
    """Be the engine-core process until told to stop; the process exits with 1 if the core died.

    Ctrl-C and a service manager's SIGTERM reach every process of the group. The API process
    decides what they mean (a drain, an end) and sends ``Shutdown``, so they are ignored here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(
        target=_exit_with_parent, args=(addresses.folder,), name="parent watch", daemon=True
    ).start()
    with closing(CoreChannel(addresses)) as channel, ExitStack() as owned, death_reported(channel):
        core = create_core()
        owned.callback(core.shutdown)  # after the report: it may fail or hang on a broken device
        serve_core(core, channel)


def serve_core(core: Core, channel: "CoreChannel") -> None:
    """Announce the core and answer messages until ``Shutdown``."""
    channel.send(core.info)
    while True:
        messages = channel.receive(block=not core.has_work)
        if any(isinstance(message, Shutdown) for message in messages):
            return
        core.apply([message for message in messages if not isinstance(message, Shutdown)])
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
    """The core's end of the sockets; typed msgpack in both directions."""

    def __init__(self, addresses: CoreAddresses) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._inbox.bind(addresses.to_core)
        self._outbox.connect(addresses.from_core)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[CoreMessage | Shutdown])

    def receive(self, *, block: bool) -> list[CoreMessage | Shutdown]:
        """Return every message that has arrived, in order; ``block`` waits for the first."""
        messages: list[CoreMessage | Shutdown] = []
        flags = 0 if block else zmq.NOBLOCK
        while True:
            try:
                messages += self._decoder.decode(self._inbox.recv(flags))
            except zmq.Again:
                return messages
            flags = zmq.NOBLOCK

    def send(self, reply: CoreReply) -> None:
        """Queue a reply."""
        self._outbox.send(self._encoder.encode(reply))

    def close(self) -> None:
        """Deliver what is queued and close."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=DELIVERY_TIMEOUT_MS)
        self._context.term()


def _exit_with_parent(folder: str) -> None:
    """End this process when the one that started it is gone, whatever the main loop is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a child process"
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
