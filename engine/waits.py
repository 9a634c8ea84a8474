"""Core process: the named events that a request may have to see before it can be planned."""

from collections.abc import Container
from typing import Protocol

from octavo.block_manager.manager import BlockManager, Coming
from octavo.engine.request import Request

MAX_DEFERRALS = 256
"""Plans that a request may be deferred for; afterwards it computes the shared prefix itself."""


class Wait(Protocol):
    """One kind of event. Requests behind a waiting one may pass it; it keeps its place."""

    def reason(self, request: Request) -> str | None:
        """Return what the request waits for, or None when it does not have to wait."""


class AwaitingResult:
    """A retracted request whose last token is still on the device cannot get a new row."""

    def reason(self, request: Request) -> str | None:
        """Wait while tokens are promised."""
        return "awaiting result" if request.num_promised_tokens else None


class PrefixDeferral:
    """A request that shares much of its prompt with a running prefill waits for that to be computed
    once.

    The wait ends when the shared blocks are planned, when the computing request leaves the running
    set, or after ``MAX_DEFERRALS`` plans.
    """

    def __init__(
        self, block_manager: BlockManager, running: Container[int], min_deferral_tokens: int
    ) -> None:
        self._block_manager = block_manager
        self._running = running
        self._min_tokens = min_deferral_tokens

    def reason(self, request: Request) -> str | None:
        """Wait for the prefix that another request is computing."""
        if request.message.skip_reading_prefix_cache or request.num_deferrals >= MAX_DEFERRALS:
            return None
        coming = self._coming(request)
        if coming is None:
            return None
        request.num_deferrals += 1
        return f"deferred: prefix of {coming.number}"

    def _coming(self, request: Request) -> Coming | None:
        coming = self._block_manager.coming(request.number, request.num_known_tokens)
        if coming is None:
            return None
        if request.num_deferrals == 0 and coming.num_tokens < self._min_tokens:
            return None  # not worth beginning to wait; a wait once begun goes to its end
        return coming if coming.number in self._running else None
