"""API process: how the front end talks to an engine core, in this process or in another one."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.engine.core import EngineCore
from octavo.engine.messages import CoreInfo, CoreMessage, CoreOutputs
from octavo.errors import EngineDeadError

logger = logging.getLogger(__name__)


class CoreClient(Protocol):
    """One interface for both forms. Messages are applied in the order in which they were sent."""

    info: CoreInfo

    def send(self, messages: Sequence[CoreMessage]) -> None:
        """Hand over messages; returns at once.

        Raises:
            EngineDeadError: the core has died.
        """

    def receive(self) -> CoreOutputs:
        """Return what the next step produced; blocks while the core has nothing to report.

        Raises:
            EngineDeadError: the core has died; every unfinished request ends with ``error``.
        """

    def shutdown(self) -> None:
        """Stop the core and free what it holds."""


class ListeningCoreClient(CoreClient, Protocol):
    """A client that an event loop can wait for."""

    def listen(
        self, on_outputs: Callable[[CoreOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        """Call back on the running event loop, instead of ``receive``: with the outputs of each
        step in order, and at the core's death, once and last, with the reason.
        """

    def hang_up(self) -> None:
        """Call back no more, and begin what ``shutdown`` waits for; on the event loop."""


class InProcessClient:
    """The core in this process: ``receive`` runs its steps."""

    def __init__(self, core: EngineCore) -> None:
        self.info = core.info
        self._core = core
        self._death: str | None = None

    def send(self, messages: Sequence[CoreMessage]) -> None:
        """Apply messages directly."""
        self._check_alive()
        self._core.apply(messages)

    def receive(self) -> CoreOutputs:
        """Run steps until one has something to report; there must be work."""
        self._check_alive()
        assert self._core.has_work, "receive without a request would wait for ever"
        try:
            while True:
                outputs = self._core.step()
                if outputs is not None:
                    return outputs
        except Exception as failure:  # the engine's main loop: it dies here, loudly
            logger.exception("the engine core died")
            self._death = f"the engine core died: {failure!r}"
            raise EngineDeadError(self._death) from failure

    def shutdown(self) -> None:
        """Stop the core's executor."""
        if self._death is None:
            self._death = "the engine was shut down: make a new one"
        self._core.shutdown()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
