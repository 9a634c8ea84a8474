"""API process: notices that the core owes answers and no step ends, and says who waits for what."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.messages import AddRequest, CoreOutputs, CoreStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Owed:
    """A request of which the core has not told the end."""

    request_id: str
    is_started: bool = False


class StallDetector:
    """Owns the time of the core's last sign of life, and which requests it has not ended.

    Requests that the front end has given up count until the core has ended them: an engine that
    stands still is not ready because its clients have left. A stall is logged once. While the core
    is paused nothing is expected of it.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._owed: dict[int, Owed] = {}  # the oldest first
        self._stats: CoreStats | None = None
        self._last_step_s = clock()
        self._is_logged = False

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step if they are more than the limit, else 0."""
        waited_s = self._waited_s
        return waited_s if waited_s >= self._limit_s else 0.0

    @property
    def stall(self) -> str | None:
        """Which request waits for what, with the numbers; None while steps end in time."""
        stalled_s = self.stalled_s
        if not stalled_s:
            return None
        number, oldest = next(iter(self._owed.items()))
        return (
            f"no step has ended for {stalled_s:.0f} s; {self._describe_load()}; the oldest request,"
            f" {oldest.request_id} (number {number}), {self._describe_wait(number)}"
        )

    def add(self, messages: Sequence[AddRequest]) -> None:
        """Note requests that are sent to the core."""
        if not self._owed:
            self._last_step_s = self._clock()
        self._owed.update({message.number: Owed(message.request_id) for message in messages})

    def update(self, outputs: CoreOutputs) -> None:
        """Note that a step has ended."""
        self._stats = outputs.stats
        for started in outputs.started:
            if started.number in self._owed:
                self._owed[started.number].is_started = True
        for report in outputs.finished:
            self._owed.pop(report.number, None)
        if self._is_logged:
            waited_s = self._clock() - self._last_step_s
            logger.warning("a step has ended after %.0f s: the engine goes on", waited_s)
            self._is_logged = False
        self._last_step_s = self._clock()

    def stop(self) -> None:
        """Expect nothing any more: the core is dead, or being stopped."""
        self._owed.clear()

    def check(self) -> float:
        """Log a stall, once; return the seconds after which to look again."""
        stall = self.stall
        if stall is None:
            return self._limit_s - self._waited_s
        if not self._is_logged:
            logger.error("%s", stall)
            self._is_logged = True
        return self._limit_s

    @property
    def _waited_s(self) -> float:
        """How long something has been expected of the core."""
        is_paused = self._stats is not None and self._stats.is_paused
        return self._clock() - self._last_step_s if self._owed and not is_paused else 0.0

    def _describe_load(self) -> str:
        stats = self._stats
        if stats is None:
            return "none ever has"
        return (
            f"when the last did, {stats.num_running} requests ran, {stats.num_waiting} waited and"
            f" {stats.num_blocks_used} of {stats.num_blocks} KV blocks were in use"
        )

    def _describe_wait(self, number: int) -> str:
        """Say what one request waits for, as far as the core has told."""
        stats = self._stats
        if stats is not None and number == stats.oldest_waiting:
            return f"waits: {stats.oldest_waiting_reason}"
        if self._owed[number].is_started:
            return "runs and waits for the result of its step"
        if stats is not None and stats.oldest_waiting is not None:
            return f"waits behind number {stats.oldest_waiting}: {stats.oldest_waiting_reason}"
        return "waits for the result of its first step"
