"""Host cost of planning: plan + update at many running and waiting requests, keys and blocks.

Prints one JSON line a case; times in microseconds. No device, no model. With limit "rows" all rows
are taken; with limit "blocks" every plan looks at the queue, because KV blocks keep it waiting.

usage: python benchmarks/scheduler.py [--running 1,64,256] [--waiting 1000] [--steps 400]
    [--policies fcfs,priority,lpm,dfs]
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from itertools import product
from typing import Any

import numpy as np

from octavo.block_manager.hashing import KeyChain, root_key
from octavo.config import SchedulerConfig, SchedulingPolicyName
from octavo.engine.messages import AddRequest, pack_ids
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.executor.step import RowSampling, StepResult

PROMPT_LEN = 200
BLOCKS_PER_RUNNING = 98
"""Prompt, output and growth of a request in the middle of the measured steps."""


def main() -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", default="1,64,256")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policies", default="fcfs,priority,lpm,dfs")
    args = parser.parse_args()
    for num_running in map(int, args.running.split(",")):
        for policy, limit in product(args.policies.split(","), ("rows", "blocks")):
            config = make_config(num_running, policy, limit)
            settings, times = measure_decode(config, num_running + args.waiting, args.steps)
            report("plan+update", {"limit": limit, "policy": policy, **settings}, times)
    report("keys+blocks per 1000 tokens", {"block_size": 16}, measure_keys())


def make_config(num_running: int, policy: SchedulingPolicyName, limit: str) -> SchedulerConfig:
    """Return settings under which rows or blocks let about ``num_running`` requests run."""
    is_rows = limit == "rows"
    return SchedulerConfig(
        num_blocks=60_000 if is_rows else max(1_000, BLOCKS_PER_RUNNING * num_running),
        block_size=16,
        max_num_seqs=num_running if is_rows else 4 * num_running,
        max_num_batched_tokens=16_384,
        max_model_len=8_192,
        policy=policy,
    )


def measure_decode(
    config: SchedulerConfig, num_requests: int, num_steps: int
) -> tuple[dict[str, int], list[float]]:
    """Time plan + update of steps in which some requests decode and others wait.

    Returns how many did so in the end, and the times.
    """
    scheduler = Scheduler(config)
    generator = np.random.default_rng(0)
    for number in range(num_requests):
        add(scheduler, number, generator.integers(0, 30_000, PROMPT_LEN))
    while not scheduler.running or any(
        request.num_known_tokens == PROMPT_LEN for request in scheduler.running.values()
    ):
        run_step(scheduler)
    times = [run_step(scheduler) for _ in range(num_steps)]
    return {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}, times


def run_step(scheduler: Scheduler) -> float:
    """Plan one step and update with arbitrary tokens; returns seconds spent in the scheduler."""
    started = time.perf_counter()
    step = scheduler.plan(0.0)
    planned = time.perf_counter()
    assert step is not None
    result = StepResult(step.step_id, np.full(step.num_sampled, 7, dtype=np.int32))
    again = time.perf_counter()
    scheduler.update(result)
    scheduler.take_finished()
    return (planned - started) + (time.perf_counter() - again)


def measure_keys(num_tokens: int = 1000) -> list[float]:
    """Time the keys, blocks and release of fresh prompts of ``num_tokens`` tokens."""
    config = SchedulerConfig(
        num_blocks=1_000,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=16_384,
        max_model_len=8_192,
    )
    scheduler = Scheduler(config)
    generator = np.random.default_rng(0)
    times = []
    for number in range(200):
        message = make_message(number, generator.integers(0, 30_000, num_tokens))
        request = Request(message)
        started = time.perf_counter()
        chain = KeyChain(root_key(b"bench"), 16)
        chain.extend(request.token_ids)
        scheduler.add(request, chain)
        scheduler.plan(0.0)
        scheduler.abort([number])
        times.append(time.perf_counter() - started)
        scheduler.take_finished()
    return times


def add(scheduler: Scheduler, number: int, prompt: np.ndarray) -> None:
    """Queue one request."""
    request = Request(make_message(number, prompt))
    chain = KeyChain(root_key(b"bench"), 16)
    chain.extend(request.token_ids)
    scheduler.add(request, chain)


def make_message(number: int, prompt: np.ndarray) -> AddRequest:
    """Build an AddRequest that never stops early."""
    return AddRequest(
        number=number,
        request_id=str(number),
        prompt=pack_ids(prompt),
        sampling=RowSampling(seed=0),
        max_tokens=4_000,
        arrival_s=0.0,
    )


def report(case: str, settings: dict[str, Any], times: list[float]) -> None:
    """Print one JSON line."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    times = sorted(times)
    line = {
        "benchmark": "scheduler",
        "case": case,
        **settings,
        "median_us": round(1e6 * statistics.median(times), 1),
        "p99_us": round(1e6 * times[int(0.99 * (len(times) - 1))], 1),
        "commit": commit,
        "device": platform.processor() or platform.machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
