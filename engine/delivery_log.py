"""API process: when readers took the last outputs of requests that have ended."""

from collections import OrderedDict
from collections.abc import Iterable

NUM_KEPT = 1_000


class DeliveryLog:
    """Owns the newest times by request number; one that nobody read to its end has none."""

    def __init__(self) -> None:
        self._times_s: OrderedDict[int, float] = OrderedDict()

    def note(self, numbers: Iterable[int], now_s: float) -> None:
        """Remember when the last output of these answers to one request was taken."""
        self._times_s.update(dict.fromkeys(numbers, now_s))
        while len(self._times_s) > NUM_KEPT:
            self._times_s.popitem(last=False)

    def find(self, number: int) -> float | None:
        """Return that time, if it is known."""
        return self._times_s.get(number)
