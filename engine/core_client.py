"""API process: how the front end talks to an engine core, in this process or in another one."""

from collections.abc import Sequence
from typing import Protocol

from octavo.engine.messages import CoreInfo, CoreMessage, CoreOutputs


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
