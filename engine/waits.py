"""Core process: why requests wait, and the named events that one may have to see before it runs."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from octavo.block_manager.manager import BlockManager, Coming
from octavo.engine.request import Request

MAX_DEFERRALS = 256
"""Plans that a request may be deferred for; afterwards it computes the shared prefix itself."""


class WaitKind(StrEnum):
    """What a waiting request waits for."""

    RESULT = "result"
    """Its own last token, which is still on the device."""
    DEFERRED = "deferred"
    """A prefix that another request is computing."""
    BLOCKS = "blocks"
    """KV blocks, for itself or for one that goes before it."""
    ROWS = "rows"
    """An end of one of ``max_num_seqs`` running requests."""
    TOKENS = "tokens"
    """A step with tokens to spare."""
    TURN = "turn"
    """A plan that looks at it: there are too many before it."""
    PAUSE = "pause"
    """The end of a pause of the whole engine."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """What a request waits for, and the same in words with the numbers."""

    kind: WaitKind
    text: str


NOT_ITS_TURN = WaitReason(WaitKind.TURN, "a plan has looked at as many before it as it looks at")
AWAITING_RESULT = WaitReason(WaitKind.RESULT, "awaiting result")
PAUSED = WaitReason(WaitKind.PAUSE, "the engine is paused")


class Holdups:
    """Why one plan left requests in the queue: those it looked at by number, the rest together."""

    def __init__(self, rest: WaitReason = NOT_ITS_TURN) -> None:
        self.rest = rest
        self._named: dict[int, WaitReason] = {}

    def hold(self, number: int, reason: WaitReason) -> None:
        """Pass over one request."""
        self._named[number] = reason

    def stop_at(self, number: int, reason: WaitReason) -> None:
        """Start neither this request nor anybody behind it."""
        self.hold(number, reason)
        self.rest = WaitReason(reason.kind, f"behind request {number}, which {reason.text}")

    def reason(self, number: int) -> WaitReason:
        """Return why the plan did not start this request, which waits."""
        return self._named.get(number, self.rest)

    def count(self, num_waiting: int, unfinished: Container[int]) -> dict[str, int]:
        """Return how many of the requests that still wait do so for what."""
        if not num_waiting:
            return {}
        counts = Counter(
            reason.kind.value for number, reason in self._named.items() if number in unfinished
        )
        num_others = num_waiting - counts.total()
        if num_others:
            counts[self.rest.kind.value] += num_others
        return counts


class Wait(Protocol):
    """One kind of event. Requests behind a waiting one may pass it; it keeps its place."""

    def reason(self, request: Request) -> WaitReason | None:
        """Return what the request waits for, or None when it does not have to wait."""


class AwaitingResult:
    """A retracted request whose last token is still on the device cannot get a new row."""

    def reason(self, request: Request) -> WaitReason | None:
        """Wait while tokens are promised."""
        return AWAITING_RESULT if request.num_promised_tokens else None


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

    def reason(self, request: Request) -> WaitReason | None:
        """Wait for the prefix that another request is computing."""
        if request.message.skip_reading_prefix_cache or request.num_deferrals >= MAX_DEFERRALS:
            return None
        coming = self._coming(request)
        if coming is None:
            return None
        request.num_deferrals += 1
        return WaitReason(WaitKind.DEFERRED, f"deferred: prefix of {coming.number}")

    def _coming(self, request: Request) -> Coming | None:
        coming = self._block_manager.coming(request.number, request.num_known_tokens)
        if coming is None:
            return None
        if request.num_deferrals == 0 and coming.num_tokens < self._min_tokens:
            return None  # not worth beginning to wait; a wait once begun goes to its end
        return coming if coming.number in self._running else None
