"""A long random life of an engine core: one cheap random walk beside many short ones."""

import logging
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from octavo.engine.messages import (
    AbortRequests,
    ExpireRequests,
    FinishRequest,
    ResetPrefixCache,
    unpack_ids,
)
from octavo.executor.step import RowSampling
from tests.engine.liveness import WatchedRun
from tests.engine.requests import EOS, make_add, make_core
from tests.fake_executor import Faults, every_nth

ROOT = str(Path(__file__).parents[2])
LIMIT = 24
STEPS_PER_LIFE = 500


def live(seed, num_steps):
    """Run one core for a number of steps under random load; returns it idle, all ends checked.

    Eight seeds in a row see every policy with either lag.
    """
    rng = random.Random(seed)
    run = make_core(
        lag=seed // 4 % 2,
        policy=["fcfs", "priority", "lpm", "dfs"][seed % 4],
        num_blocks=6,
        max_num_seqs=rng.randint(2, 4),
        max_num_batched_tokens=rng.randint(4, 32),
        conservativeness=rng.choice([0.0, 1.0]),
        min_deferral_tokens=rng.choice([4, 8, 256]),
        long_prefill_token_threshold=rng.choice([None, 2]),
        executor_options={
            "special_token": every_nth(9, EOS),
            "faults": Faults(submit=set(rng.sample(range(num_steps), 3))),
        },
    )
    watched = WatchedRun(run)
    added = {}
    while run.num_steps < num_steps:
        if len(run.scheduler.requests) < 12 and rng.random() < 0.4:
            added[len(added)] = message = random_add(rng, len(added), run.core.info)
            run.core.apply([message])
        disturb(rng, watched)
        if run.core.has_work:
            watched.step()
        else:
            run.num_steps += 1
    watched.pause(False)
    while run.core.has_work:
        watched.step()
        assert run.num_steps < num_steps + 12 * 12 * LIMIT
    assert set(run.finished) == set(added)
    for number, final in run.finished.items():
        check_tokens(run, added[number], final)
    assert run.scheduler.block_manager.pool.num_used == 0
    return run


def random_add(rng, number, info):
    words = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    prompt = [token for _ in range(rng.randint(0, 4)) for token in rng.choice(words)]
    prompt += range(40, 40 + rng.randint(1, 4))
    skips_cache = rng.random() < 0.1
    return make_add(
        number,
        prompt,
        max_tokens=rng.randint(1, info.max_tokens_per_request - len(prompt)),
        sampling=RowSampling(
            seed=number, temperature=1.0, num_prompt_logprobs=0 if skips_cache else None
        ),
        priority=rng.randint(-2, 2) if info.scheduling_policy == "priority" else 0,
        cache_salt=rng.choice([None, None, "a"]),
        skip_reading_prefix_cache=skips_cache,
    )


def disturb(rng, watched):
    """Now and then pause, abort, expire, finish or reset."""
    run = watched.run
    if rng.random() < 0.05:
        watched.pause(rng.random() < 0.3)
    if not run.scheduler.requests:
        return
    request = rng.choice(list(run.scheduler.requests.values()))
    event = rng.random()
    if event < 0.03:
        watched.end(request.number, AbortRequests((request.number,)))
    elif event < 0.06 and request.num_output_tokens:
        kept = rng.randint(0, request.num_output_tokens)
        watched.end(request.number, FinishRequest(request.number, "x", kept))
    elif event < 0.08:
        watched.end(request.number, ExpireRequests((request.number,), "its time is up"))
    elif event < 0.09:
        run.core.apply([ResetPrefixCache()])


def check_tokens(run, message, final):
    got = run.tokens.get(message.number, [])
    prompt = unpack_ids(message.prompt).tolist()
    alone = run.executor.expected_tokens(prompt, len(got), message.sampling)
    assert got == alone
    if final.reason == "length":
        assert len(got) == message.max_tokens


def test_a_life_of_many_steps_breaks_no_invariant():
    runs = [live(seed, STEPS_PER_LIFE) for seed in range(8)]
    assert sum(run.scheduler.num_retractions for run in runs) > 0
    assert sum(run.scheduler.block_manager.stats.num_hits for run in runs) > 0


@pytest.mark.slow
def test_a_million_steps_break_no_invariant(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # the processes import this module by its name
    seeds = range(1_000, 1_000 + 1_000_000 // STEPS_PER_LIFE)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        assert sum(processes.map(live_silently, seeds, chunksize=20)) >= 1_000_000


def live_silently(seed):
    """Run one life in another process; returns its steps."""
    logging.disable(logging.CRITICAL)
    return live(seed, STEPS_PER_LIFE).num_steps
