"""A scheduler with a clock made of arithmetic: every decision is the engine's own.

The time of a step is its floor on one H200 for Qwen3-8B in bf16: weights or products, attention's
K/V, and a constant for launches (docs/benchmarks.md says where the constants come from).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from octavo.block_manager.hashing import KeyChain, root_key
from octavo.config import SchedulerConfig
from octavo.engine.messages import AddRequest, pack_ids
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.executor.step import RowSampling, Step, StepResult

BANDWIDTH = 4.3e12  # bytes a second
MATMUL_RATE = 790e12  # bf16 operations a second
ATTENTION_RATE = 400e12
WEIGHT_BYTES = 15.14e9
PARAMETERS = WEIGHT_BYTES / 2
KV_BYTES_PER_TOKEN = 147_456
ATTENTION_OPERATIONS = 4 * 4096 * 36  # per pair of tokens: heads x head_dim x layers, both products
LAUNCH_S = 0.3e-3
NEW_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload."""

    prompt: list[int]
    num_output_tokens: int
    at_s: float = 0.0


@dataclass(slots=True)
class Life:
    """What happened to one simulated request."""

    arrival: Arrival
    token_times_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        """Times between its tokens."""
        return np.diff(self.token_times_s).tolist()


class Simulation:
    """Runs arrivals through a scheduler without a device."""

    def __init__(self, config: SchedulerConfig, *, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler(config)
        self.lives: dict[int, Life] = {}
        self.now_s = 0.0
        self.num_steps = 0
        self.num_computed_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens read from the cache, of all."""
        stats = self.scheduler.block_manager.stats
        return stats.num_hits / stats.num_queries

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Let requests arrive at their times and run until all have ended."""
        pending = sorted(arrivals, key=lambda arrival: arrival.at_s)
        index = 0
        while index < len(pending) or self.scheduler.has_unfinished_requests:
            if not self.scheduler.has_unfinished_requests:
                self.now_s = max(self.now_s, pending[index].at_s)
            while index < len(pending) and pending[index].at_s <= self.now_s:
                self.add(pending[index])
                index += 1
            self.step()

    def add(self, arrival: Arrival) -> None:
        """Queue one request now."""
        number = len(self.lives)
        message = AddRequest(
            number=number,
            request_id=str(number),
            prompt=pack_ids(arrival.prompt),
            sampling=RowSampling(seed=0),
            max_tokens=arrival.num_output_tokens,
            arrival_s=self.now_s,
        )
        request = Request(message)
        chain = KeyChain(root_key(b"simulation"), self.scheduler.config.block_size)
        chain.extend(request.token_ids)
        self.scheduler.add(request, chain)
        self.lives[number] = Life(arrival)

    def step(self) -> None:
        """Plan one step, let its time pass, apply its result."""
        step = self.scheduler.plan(self.now_s)
        assert step is not None
        self.now_s += step_time_s(step)
        self.num_steps += 1
        self.num_computed_tokens += int(step.num_tokens.sum())
        tokens = np.full(step.num_sampled, NEW_TOKEN, dtype=np.int32)
        updated = self.scheduler.update(StepResult(step.step_id, tokens))
        for request in updated.sampled:
            if request is not None:
                self.lives[request.number].token_times_s.append(self.now_s)
        self.scheduler.take_finished()


def step_time_s(step: Step) -> float:
    """Return the floor of a step: see the module's docstring."""
    num_tokens = int(step.num_tokens.sum())
    contexts = step.num_computed_tokens + step.num_tokens
    pairs = float(np.sum(step.num_tokens * (contexts - step.num_tokens / 2)))
    linear_s = max(WEIGHT_BYTES / BANDWIDTH, 2 * PARAMETERS * num_tokens / MATMUL_RATE)
    attention_s = max(
        float(contexts.sum()) * KV_BYTES_PER_TOKEN / BANDWIDTH,
        pairs * ATTENTION_OPERATIONS / ATTENTION_RATE,
    )
    return linear_s + attention_s + LAUNCH_S
