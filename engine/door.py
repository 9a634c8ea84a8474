"""API process: refuses requests while too many wait, and says when to come back."""

import math
from collections import deque
from dataclasses import dataclass

from octavo.errors import QueueFullError

REFUSALS = ("queue_full_requests", "queue_full_tokens")
"""The ``reason_code`` of each cap."""
RATE_WINDOW_S = 30.0
"""The service rate is that of the starts within this time."""
DEFAULT_RETRY_S = 1.0
"""Said while no start was seen: nothing is known about the rate."""
MAX_RETRY_S = 600.0


@dataclass(frozen=True, slots=True)
class QueueCaps:
    """How much may wait; None is no cap."""

    max_requests: int | None = None
    max_tokens: int | None = None


NO_CAPS = QueueCaps()


class Door:
    """Owns what is known of the queue outside the core: who waits, and how fast they start.

    A request enters when it is sent to the core and leaves when it starts or ends.
    """

    def __init__(self, caps: QueueCaps) -> None:
        self._caps = caps
        self._waiting: dict[int, int] = {}  # number -> prompt tokens
        self._num_tokens = 0
        self._starts: deque[tuple[float, int]] = deque()  # time, prompt tokens

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens."""
        return self._num_tokens

    def check(self, num_requests: int, num_tokens: int, *, now_s: float) -> None:
        """Let ``num_requests`` more requests with together ``num_tokens`` prompt tokens pass.

        An empty queue lets everything pass.

        Raises:
            QueueFullError: a cap would be exceeded.
        """
        if not self._waiting:
            return
        caps = self._caps
        if caps.max_requests is not None:
            excess = self.num_requests + num_requests - caps.max_requests
            if excess > 0:
                retry_s = self._estimate_s(excess, by_tokens=False, now_s=now_s)
                raise QueueFullError(
                    f"{self.num_requests} requests wait and {num_requests} more would exceed "
                    f"max_queued_requests ({caps.max_requests}); retry in {retry_s:.0f} s",
                    reason_code=REFUSALS[0],
                    retry_after_s=retry_s,
                )
        if caps.max_tokens is not None:
            excess = self.num_tokens + num_tokens - caps.max_tokens
            if excess > 0:
                retry_s = self._estimate_s(excess, by_tokens=True, now_s=now_s)
                raise QueueFullError(
                    f"{self.num_tokens} prompt tokens wait and {num_tokens} more would exceed "
                    f"max_queued_tokens ({caps.max_tokens}); retry in {retry_s:.0f} s",
                    reason_code=REFUSALS[1],
                    retry_after_s=retry_s,
                )

    def enter(self, number: int, num_tokens: int) -> None:
        """A request was sent to the core."""
        self._waiting[number] = num_tokens
        self._num_tokens += num_tokens

    def start(self, number: int, *, now_s: float) -> None:
        """A request was admitted by the core; unknown numbers are ignored."""
        num_tokens = self._remove(number)
        if num_tokens is not None:
            self._forget_old_starts(now_s)
            self._starts.append((now_s, num_tokens))

    def leave(self, number: int) -> None:
        """A request ended, started or not."""
        self._remove(number)

    def _remove(self, number: int) -> int | None:
        num_tokens = self._waiting.pop(number, None)
        if num_tokens is not None:
            self._num_tokens -= num_tokens
        return num_tokens

    def _estimate_s(self, excess: int, *, by_tokens: bool, now_s: float) -> float:
        """Return the seconds after which ``excess`` requests or tokens will have started."""
        self._forget_old_starts(now_s)
        if not self._starts:
            return DEFAULT_RETRY_S
        num_started = sum(tokens if by_tokens else 1 for _, tokens in self._starts)
        seconds = max(now_s - self._starts[0][0], 1.0)
        estimate = excess * seconds / num_started
        return float(min(MAX_RETRY_S, max(1, math.ceil(estimate))))

    def _forget_old_starts(self, now_s: float) -> None:
        while self._starts and self._starts[0][0] < now_s - RATE_WINDOW_S:
            self._starts.popleft()
