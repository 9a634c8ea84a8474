"""API process: what answers wait for, which were refused or timed out, under Octavo's names."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from octavo.engine.door import REFUSALS
from octavo.engine.messages import CoreStats
from octavo.engine.metric_families import Families
from octavo.engine.waits import WaitKind


class QueueMetrics:
    """The part of an engine's metrics that vLLM has no names for."""

    def __init__(self, families: Families) -> None:
        self.measure_stall: Callable[[], float] = lambda: 0.0
        """Asked at each scrape; see ``StallDetector.stalled_s``."""
        self._families = families
        self._refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self._timed_out: Counter[str] = Counter(waiting=0, running=0)

    def note_refusal(self, reason_code: str) -> None:
        """Count a client's request that a queue cap kept out."""
        self._refused[reason_code] += 1

    def note_timeout(self, *, is_started: bool) -> None:
        """Count an answer whose time was up."""
        self._timed_out["running" if is_started else "waiting"] += 1

    def collect(self, stats: CoreStats) -> Iterator[Metric]:
        """Make the series of now."""
        num_waiting = stats.num_waiting_by_reason
        yield self._families.gauge(
            "octavo_num_requests_waiting_by_reason",
            "Waiting answers by what they wait for.",
            [({"reason": kind}, num_waiting.get(kind, 0)) for kind in WaitKind],
        )
        yield self._families.gauge(
            "octavo_paused", "1 while the engine is paused.", [({}, stats.is_paused)]
        )
        yield self._families.gauge(
            "octavo_stall_seconds",
            "Time since the last step of an engine that stands still, else 0.",
            [({}, self.measure_stall())],
        )
        yield self._families.counter(
            "octavo_requests_refused",
            "Requests that a cap of the queue kept out.",
            [({"reason_code": code}, count) for code, count in self._refused.items()],
        )
        yield self._families.counter(
            "octavo_request_timeouts",
            "Answers whose time was up, by what they did then.",
            [({"state": state}, count) for state, count in self._timed_out.items()],
        )
