"""How many of torch's threads compute a step on a CPU: measured at the start, by a server twice.

A second thread halves a large product, but waking it costs more than a small one takes; where other
processes want the cores, it costs most. Only a measurement on the machine itself tells.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

MEASURED_ROWS = (1, 4, 16)
"""Beyond the last all threads are taken: a prompt."""
NUM_REPEATS = 3
MAX_REPEATS = 8
"""So many before it is believed that threads do not gain: a core may be away for a while."""
LEAST_GAIN = 1.1
"""More threads are taken if they are so many times as fast: others have use for the cores."""


@dataclass(frozen=True, slots=True)
class StepThreads:
    """One thread for steps of fewer than ``min_tokens`` tokens, else ``num_threads``."""

    num_threads: int
    min_tokens: int

    def __str__(self) -> str:
        """Return it for the log."""
        if self.num_threads == 1 or self.min_tokens <= 1:
            return f"threads of a step: {self.num_threads}"
        return f"threads of a step: {self.num_threads}, 1 for fewer than {self.min_tokens} tokens"

    @contextmanager
    def use(self, num_tokens: int) -> Iterator[None]:
        """Let torch compute with as many threads as suit a step."""
        before = torch.get_num_threads()
        wanted = self.num_threads if num_tokens >= self.min_tokens else 1
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def measure_threads(run: Callable[[int], object]) -> Iterator[StepThreads | None]:
    """Find from which number of rows on all of torch's threads beat one at ``run(num_rows)``.

    Yields None after each run, for requests may wait for the caller, and last what was found.
    """
    num_threads = torch.get_num_threads()
    min_tokens = MEASURED_ROWS[-1] + 1
    for num_rows in MEASURED_ROWS if num_threads > 1 else ():
        if (yield from _gains(run, num_rows, num_threads)):
            min_tokens = num_rows
            break
    yield StepThreads(num_threads, min_tokens)


def _gains(
    run: Callable[[int], object], num_rows: int, num_threads: int
) -> Generator[None, None, bool]:
    """Return whether the best time with all threads is that much below the best with one.

    In turns, for the machine may be shared; yields after each run.
    """
    best_s = {1: float("inf"), num_threads: float("inf")}
    for repeat in range(1 + MAX_REPEATS):
        for count in best_s:
            with StepThreads(count, min_tokens=1).use(num_rows):
                started_s = time.perf_counter()
                run(num_rows)
                took_s = time.perf_counter() - started_s
            if repeat > 0:  # the first time memory is made and code compiled
                best_s[count] = min(best_s[count], took_s)
            yield
        if repeat >= NUM_REPEATS and best_s[1] > LEAST_GAIN * best_s[num_threads]:
            return True
    return False
