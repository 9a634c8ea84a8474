"""API process: where the time of steps goes and what the scheduler had to do, in Octavo's names."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from octavo.block_manager.manager import MissReason
from octavo.engine.growth import RetractionCause
from octavo.engine.histogram import Histogram
from octavo.engine.messages import CoreStats, StepTimes
from octavo.engine.metric_families import Families

# fmt: off
STEP_PART_BUCKETS = (
    .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10,
)
# fmt: on
PARTS = StepTimes.__struct_fields__
PART_HELP = "Time that the core spent on a part of a step."


class StepMetrics:
    """The part of an engine's metrics that looks into its steps."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._parts = {part: Histogram(PART_HELP, STEP_PART_BUCKETS) for part in PARTS}

    def observe(self, times: StepTimes) -> None:
        """Note the times of one step."""
        for part, histogram in self._parts.items():
            seconds: float | None = getattr(times, part)
            if seconds is not None:
                histogram.observe(seconds)

    def collect(self, stats: CoreStats) -> Iterator[Metric]:
        """Make the series of now."""
        parts = [({"part": part}, histogram) for part, histogram in self._parts.items()]
        yield self._families.histogram("octavo_step_part_seconds", PART_HELP, parts)
        yield self._families.counter(
            "octavo_retractions",
            "Times an answer lost its KV blocks, by who needed them.",
            [({"cause": cause}, stats.num_retractions.get(cause, 0)) for cause in RetractionCause],
        )
        yield self._families.counter(
            "octavo_prefix_cache_miss_tokens",
            "Prompt tokens not found in the prefix cache, by why.",
            [({"reason": reason}, stats.prefix_misses.get(reason, 0)) for reason in MissReason],
        )
