"""API process: observations by upper bound, cheap enough to make hundreds of times a step."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.utils import floatToGoString


@dataclass(slots=True)
class Histogram:
    """Observations by upper bound; a plain list, because one step observes for hundreds of rows."""

    help_text: str
    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of one value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, how many are at most that), the last one for infinity."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


def one_two_five(limit: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to ``limit``."""
    decades = (10**power for power in range(len(str(limit))))
    return [step * decade for decade in decades for step in (1, 2, 5) if step * decade <= limit]
