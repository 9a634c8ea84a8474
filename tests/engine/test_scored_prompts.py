"""Requests with ``max_tokens`` 0: their prompts are computed and scored, nothing is generated."""

import pytest

from octavo.engine.messages import AbortRequests
from octavo.engine.replay import replay
from octavo.executor.step import RowSampling
from tests.engine.requests import make_add, make_core

SCORED = {
    "max_tokens": 0,
    "sampling": RowSampling(seed=0, num_prompt_logprobs=0),
    "skip_reading_prefix_cache": True,
}


def run_all(run, messages):
    """Run to the end; return the ranks of the prompt log-probabilities by request number."""
    ranks = {}
    run.core.apply(messages)
    while run.core.has_work:
        outputs = run.step()
        for number, entries in (outputs.prompt_logprobs if outputs else {}).items():
            assert number not in ranks, "sent twice"
            ranks[number] = [entry.rank for entry in entries]
    return ranks


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("budget", [4, 7, 20, 64])
def test_a_scored_prompt_ends_with_its_log_probabilities_and_no_token(lag, budget):
    run = make_core(lag=lag, max_num_batched_tokens=budget)
    assert run_all(run, [make_add(0, 20, **SCORED)]) == {0: list(range(1, 20))}
    assert run.tokens == {}
    assert run.finished[0].reason == "length"
    assert not any(step.num_sampled for step in run.executor.steps)
    assert run.scheduler.block_manager.pool.num_used == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_scored_prompts_beside_answers_change_nothing_for_them(lag):
    alone = make_core(lag=lag).run([make_add(0, 9), make_add(2, 5)])
    run = make_core(lag=lag, max_num_batched_tokens=16)
    messages = [make_add(0, 9), make_add(1, 30, **SCORED), make_add(2, 5), make_add(3, 1, **SCORED)]
    assert run_all(run, messages) == {1: list(range(1, 30))}
    assert run.tokens == alone
    assert {final.reason for final in run.finished.values()} == {"length"}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_scored_prompt_may_fill_the_context(lag):
    run = make_core(lag=lag, max_model_len=32, num_blocks=8)
    assert run_all(run, [make_add(0, 32, **SCORED)]) == {0: list(range(1, 32))}


@pytest.mark.parametrize("lag", [0, 1])
def test_scored_prompts_under_pressure_end_and_are_whole(lag):
    run = make_core(lag=lag, num_blocks=14, max_num_batched_tokens=6, max_num_seqs=4)
    answers = [make_add(number, 12, max_tokens=30) for number in range(2)]
    scored = [make_add(number, 25, **SCORED) for number in range(2, 6)]
    ranks = run_all(run, [*answers, *scored])
    assert run.scheduler.num_retractions > 0
    assert ranks == {number: list(range(1, 25)) for number in range(2, 6)}
    journal = run.scheduler.journal
    replay([journal.config_record, *journal.records])


@pytest.mark.parametrize("lag", [0, 1])
def test_an_aborted_scored_prompt_leaves_nothing(lag):
    run = make_core(lag=lag, max_num_batched_tokens=8)
    run.core.apply([make_add(0, 30, **SCORED)])
    run.step()
    assert run_all(run, [AbortRequests((0,))]) == {}
    assert run.finished[0].reason == "abort"
    assert run.scheduler.block_manager.pool.num_used == 0


def test_what_a_scored_prompt_computed_is_cached_for_others():
    run = make_core()
    run_all(run, [make_add(0, list(range(100, 120)), **SCORED)])
    run.run([make_add(1, list(range(100, 121)))])
    assert run.scheduler.block_manager.stats.num_hits == 20
