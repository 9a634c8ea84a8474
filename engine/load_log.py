"""API process: a line in the log about load and speed every ten seconds of work.

Its words are vLLM's, because programs read them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class Load(NamedTuple):
    """Gauges of now, and counters since the start."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int


class LoadSource(Protocol):
    """Who knows the load."""

    def read_load(self) -> Load:
        """Return it."""


class LoadLog:
    """Owns the counters at the last look; silent while nothing runs, waits or was generated."""

    def __init__(self, metrics: LoadSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last = metrics.read_load()
        self._last_s = clock()

    async def run(self) -> None:
        """Look again and again; the task ends with the server."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Log a line, if there was work since the last look."""
        load, now_s = self._metrics.read_load(), self._clock()
        if load.num_running or load.num_waiting or load[3:] != self._last[3:]:
            logger.info("%s", self._describe(load, now_s - self._last_s))
        self._last, self._last_s = load, now_s

    def _describe(self, load: Load, passed_s: float) -> str:
        prompt, generated, queries, hits = (
            now - before for now, before in zip(load[3:], self._last[3:], strict=True)
        )
        hit_rate = hits / queries if queries else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {prompt / passed_s:.1f} tokens/s,"
            f" Avg generation throughput: {generated / passed_s:.1f} tokens/s,"
            f" Running: {load.num_running} reqs, Waiting: {load.num_waiting} reqs,"
            f" GPU KV cache usage: {load.kv_usage:.1%}, Prefix cache hit rate: {hit_rate:.1%}"
        )
