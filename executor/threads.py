"""How many of torch's threads compute a step on a CPU: steps themselves show it.

A second thread halves a large product, but waking it costs more than a small one takes; where other
processes want the cores, it costs most. Only the steps of this machine tell, while it does whatever
else it does.
"""

import logging
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

MAX_TRIED_TOKENS = 63
"""Steps of more tokens, which are prompts and take long, are computed by all threads."""
NUM_AGREEING = 3
"""Pairs of a step of one thread and one of all, of five at most, that decide a trial."""
TRUST_S = 15.0
"""How long steps take at the least, all in all, before what a trial has shown is tried again."""
TRUST_FACTOR = 20
"""So many times what its steps take a trial is trusted: one thread of many may be far slower."""
LEAST_GAIN = 1.1
"""More threads are taken if they are so many times as fast: others have use for the cores."""


class StepThreads:
    """Lets steps be computed by one or by all of torch's threads, whichever has proved faster.

    Steps whose numbers of tokens have as many bits are of one kind and share their trials.
    """

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._trials: dict[int, Generator[bool, float, None]] = {}
        self._is_single: dict[int, bool] = {}

    @contextmanager
    def use(self, num_tokens: int) -> Iterator[None]:
        """Let torch compute a step with as many threads as suit it."""
        if self._num_threads == 1 or not 0 < num_tokens <= MAX_TRIED_TOKENS:
            yield
            return
        kind = num_tokens.bit_length()
        if kind not in self._trials:
            self._trials[kind] = _compare(kind)
            self._is_single[kind] = next(self._trials[kind])
        started_s = time.perf_counter()
        if self._is_single[kind]:
            with _one_thread():
                yield
        else:
            yield
        self._is_single[kind] = self._trials[kind].send(time.perf_counter() - started_s)


def _compare(kind: int) -> Generator[bool, float, None]:
    """Yield whether one thread computes the next step of a kind, and get the seconds it took.

    A trial is in turns, for the machine may be shared and its speed vary. The fastest pair says how
    long its steps take: within any other the process may have been stopped.
    """
    was_single = None
    while True:
        num_gained = num_lost = 0
        fastest_s = math.inf
        while max(num_gained, num_lost) < NUM_AGREEING:
            single_s = yield True
            all_s = yield False
            fastest_s = min(fastest_s, single_s + all_s)
            if single_s < LEAST_GAIN * all_s:
                num_lost += 1
            else:
                num_gained += 1
        is_single = num_lost == NUM_AGREEING
        if is_single != was_single:
            least, most, threads = 2 ** (kind - 1), 2**kind - 1, "one" if is_single else "all"
            logger.info("threads of steps of %d to %d tokens: %s", least, most, threads)
        was_single = is_single
        left_s = max(TRUST_S, TRUST_FACTOR * (num_gained + num_lost) * fastest_s)
        while left_s > 0:
            left_s -= yield is_single


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
