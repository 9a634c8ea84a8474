"""What a plan decides, spelled out."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from octavo.engine.messages import AbortRequests, ExpireRequests, FinishRequest
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import ADMISSION_WINDOW
from octavo.engine.waits import MAX_DEFERRALS
from octavo.errors import InvalidRequestError
from octavo.executor.step import RowSampling, StepResult
from tests.engine.requests import EOS, add_request, make_add, make_core, make_scheduler
from tests.fake_executor import Faults, every_nth
from tests.steps import count_prompt_tokens

PREFIX = list(range(100, 148))


def plan(scheduler):
    step = scheduler.plan(0.0)
    scheduler.check_invariants()
    return step


def update(scheduler, step, token_id=7):
    ids = np.full(step.num_sampled, token_id, dtype=np.int32)
    updated = scheduler.update(StepResult(step.step_id, ids))
    scheduler.check_invariants()
    return updated


def test_ten_identical_prompts_are_computed_once_in_the_first_step():
    scheduler = make_scheduler(
        num_blocks=1_000,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=4_096,
        max_model_len=2_048,
        conservativeness=1.0,
    )
    prompt = list(range(1_000))
    for number in range(10):
        add_request(scheduler, number, prompt, max_tokens=8)
    first = plan(scheduler)
    assert first.num_tokens.tolist() == [1_000] + 9 * [8]
    update(scheduler, first)
    steps = [first]
    while scheduler.has_unfinished_requests:
        steps.append(plan(scheduler))
        assert set(steps[-1].num_tokens.tolist()) == {1}
        update(scheduler, steps[-1])
    assert count_prompt_tokens(steps) == 1_000 + 9 * 8


def test_rows_one_token_behind_are_served_before_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_request(scheduler, 0, 4)
    update(scheduler, plan(scheduler))
    add_request(scheduler, 1, 30)
    step = plan(scheduler)
    assert step.num_tokens.tolist() == [1, 7]
    update(scheduler, step)
    assert plan(scheduler).num_tokens.tolist() == [1, 7]


def test_a_chunk_is_capped_only_while_rows_decode():
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    add_request(scheduler, 0, 20)
    first = plan(scheduler)
    assert first.num_tokens.tolist() == [20]
    update(scheduler, first)
    add_request(scheduler, 1, 20)
    step = plan(scheduler)
    assert step.num_tokens.tolist() == [1, 3]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_blocks=8, max_model_len=1_000)
    with pytest.raises(InvalidRequestError, match=r"30 prompt tokens and max_tokens 8 .* 32"):
        add_request(scheduler, 0, 30)
    assert not scheduler.has_unfinished_requests


def test_admission_stops_at_the_first_request_that_does_not_fit():
    scheduler = make_scheduler(num_blocks=8)
    add_request(scheduler, 0, 20, max_tokens=4)
    add_request(scheduler, 1, 20, max_tokens=4)
    add_request(scheduler, 2, 4, max_tokens=4)
    plan(scheduler)
    assert list(scheduler.running) == [0]
    assert "needs 5 blocks" in scheduler.holdups.reason(1).text


def test_growth_of_running_requests_is_held_back():
    scheduler = make_scheduler(num_blocks=16, conservativeness=1.0)
    add_request(scheduler, 0, 8, max_tokens=56)
    add_request(scheduler, 1, 8, max_tokens=8)
    plan(scheduler)
    # 0.7 of the 55 tokens still to be promised, 38, take 10 blocks; 2 + 10 + 2 of 16 fit.
    assert list(scheduler.running) == [0, 1]
    add_request(scheduler, 2, 12, max_tokens=8)
    plan(scheduler)
    assert list(scheduler.running) == [0, 1]
    assert "for the growth of others" in scheduler.holdups.reason(2).text


def test_the_last_in_the_policys_order_is_retracted_and_keeps_its_tokens():
    run = make_core(num_blocks=4, max_num_seqs=2)
    run.run([make_add(0, 6, max_tokens=8), make_add(1, 6, max_tokens=8)])
    assert run.scheduler.num_retractions > 0
    assert run.finished[0].num_retractions == 0
    assert run.finished[1].num_retractions > 0
    for number in (0, 1):
        prompt = [1_000 * number + 10 + i for i in range(6)]
        assert run.tokens[number] == run.executor.expected_tokens(prompt, 8)


def test_a_more_important_request_is_admitted_first_and_retracted_last():
    run = make_core(policy="priority", num_blocks=4, max_num_seqs=2)
    messages = [make_add(n, 6, max_tokens=8, priority=p) for n, p in ((0, 5), (1, 0), (2, 1))]
    run.core.apply(messages)
    run.step()
    assert list(run.scheduler.running) == [1, 2]
    run.run()
    assert run.finished[1].num_retractions == 0


def test_a_request_retracted_twice_waits_until_its_whole_remainder_fits():
    scheduler = make_scheduler(num_blocks=8)
    add_request(scheduler, 0, 8, max_tokens=16)
    plan(scheduler)
    late = add_request(scheduler, 1, 8, max_tokens=20)
    late.num_retractions = 2
    step = plan(scheduler)
    assert list(scheduler.running) == [0]
    assert "needs 7 blocks" in scheduler.holdups.reason(1).text
    assert step is None or late.number not in scheduler.running


def make_core_with_a_shared_prefill(lag=0, **fields):
    """Return a core in which 9 decodes, 0 computes a prefix in chunks of 8, and 1 shares it."""
    fields = {"min_deferral_tokens": 16, "long_prefill_token_threshold": 8, **fields}
    run = make_core(lag=lag, **fields)
    run.core.apply([make_add(9, 4, max_tokens=100)])
    run.step()
    run.core.apply([make_add(0, [*PREFIX, 1_000]), make_add(1, [*PREFIX, 2_000])])
    run.step()
    return run


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_waits_for_a_running_prefill_that_it_shares(lag):
    run = make_core_with_a_shared_prefill(lag)
    assert run.scheduler.holdups.reason(1).text == "deferred: prefix of 0"
    assert set(run.scheduler.running) == {9, 0}
    run.run()
    assert count_prompt_tokens(run.executor.steps) == 4 + 49 + 1


def test_those_behind_a_deferred_request_may_pass_it():
    run = make_core_with_a_shared_prefill()
    run.core.apply([make_add(2, 4)])
    run.step()
    assert set(run.scheduler.running) == {9, 0, 2}


def test_a_deferral_ends_when_the_computing_request_is_aborted():
    run = make_core_with_a_shared_prefill()
    run.core.apply([AbortRequests((0,))])
    run.step()
    assert set(run.scheduler.running) == {9, 1}
    run.run()
    assert run.finished[0].reason == "abort"


def test_less_sharing_than_the_threshold_does_not_defer():
    run = make_core_with_a_shared_prefill(min_deferral_tokens=256)
    assert set(run.scheduler.running) == {9, 0, 1}


def test_a_deferral_ends_after_a_bounded_number_of_plans():
    scheduler = make_scheduler(max_num_batched_tokens=16, min_deferral_tokens=16)
    add_request(scheduler, 0, [*PREFIX, 1_000])
    waiting = add_request(scheduler, 1, [*PREFIX, 2_000])
    plan(scheduler)
    for _ in range(MAX_DEFERRALS):
        assert scheduler.rules.find_wait(waiting).text == "deferred: prefix of 0"
    assert scheduler.rules.find_wait(waiting) is None


def test_requests_with_prompt_logprobs_read_nothing_from_the_cache():
    run = make_core()
    sampling = RowSampling(seed=0, num_prompt_logprobs=0)
    run.run([make_add(0, PREFIX)])
    outputs = []
    run.core.apply([make_add(1, PREFIX, sampling=sampling, skip_reading_prefix_cache=True)])
    while run.core.has_work:
        outputs.append(run.step())
    entries = [entry for output in outputs for entry in output.prompt_logprobs.get(1, [])]
    assert [entry.rank for entry in entries] == list(range(1, 48))
    assert run.scheduler.block_manager.stats.num_misses["recompute"] == 48


@pytest.mark.parametrize("lag", [0, 1])
def test_prompt_logprobs_arrive_with_a_first_token_that_is_the_last(lag):
    run = make_core(lag=lag, max_num_batched_tokens=8)
    sampling = RowSampling(seed=0, num_prompt_logprobs=0)
    run.core.apply([make_add(0, 20, sampling=sampling, max_tokens=1)])
    entries = []
    while run.core.has_work:
        outputs = run.step()
        entries += outputs.prompt_logprobs.get(0, []) if outputs else []
    assert [entry.rank for entry in entries] == list(range(1, 20))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("budget", [5, 16, 64])
def test_prompt_logprobs_arrive_once_and_whole_in_chunks_and_after_retraction(lag, budget):
    run = make_core(lag=lag, num_blocks=14, max_num_batched_tokens=budget, max_num_seqs=2)
    sampling = RowSampling(seed=0, num_prompt_logprobs=0)
    fields = {"sampling": sampling, "skip_reading_prefix_cache": True, "max_tokens": 20}
    run.core.apply([make_add(0, 20, **fields), make_add(1, 20, **fields)])
    ranks = {0: [], 1: []}
    while run.core.has_work:
        outputs = run.step()
        for number, entries in (outputs.prompt_logprobs if outputs else {}).items():
            ranks[number] += [entry.rank for entry in entries]
    assert run.scheduler.num_retractions > 0
    assert ranks == {0: list(range(1, 20)), 1: list(range(1, 20))}


ENDS_EARLY = [AbortRequests((1,)), ExpireRequests((1,), "time is up")]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("end", ENDS_EARLY)
def test_a_request_that_is_ended_from_outside_is_in_no_further_plan(lag, end):
    run = make_core(lag=lag)
    run.core.apply([make_add(1, 5, max_tokens=100), make_add(2, 5, max_tokens=5)])
    for _ in range(3):
        run.step()
    row, num_steps = run.scheduler.running[1].row, len(run.executor.steps)
    run.core.apply([end])
    assert 1 not in run.scheduler.running
    run.step()
    assert row in run.executor.steps[num_steps].released_rows
    run.run()
    assert all(row not in step.rows.tolist() for step in run.executor.steps[num_steps:])
    assert [run.finished[number].reason for number in (1, 2)] == [end_reason(end), "length"]
    assert run.scheduler.block_manager.pool.num_used == 0


def end_reason(end):
    return "error" if isinstance(end, ExpireRequests) else "abort"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("when", ["waiting", "running", "retracted", "draining", "finished"])
@pytest.mark.parametrize("end", ENDS_EARLY)
def test_an_end_from_outside_at_any_moment_ends_a_request_once(lag, when, end):
    run = make_core(lag=lag, num_blocks=4, max_num_seqs=2)
    run.core.apply([make_add(0, 6, max_tokens=8), make_add(1, 6, max_tokens=8)])
    for _ in range(60):
        request = run.scheduler.requests.get(1)
        if request is None or request.status.name.lower() == when:
            break
        run.step()
    run.core.apply([end])
    run.run()
    assert set(run.finished) == {0, 1}
    assert run.finished[1].error == ("time is up" if run.finished[1].reason == "error" else None)
    assert len(run.tokens[0]) == 8


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "dfs"])
@pytest.mark.parametrize("end", [AbortRequests, partial(ExpireRequests, error="time is up")])
def test_waiting_requests_leave_the_queue_at_once(policy, end):
    run = make_core(policy=policy, max_num_seqs=1)
    prompts = [[10 + number % 7] * (1 + number % 13) for number in range(3_000)]
    run.core.apply([make_add(n, prompt, max_tokens=3) for n, prompt in enumerate(prompts)])
    run.step()
    run.core.apply([end(tuple(range(1, 2_999)))])
    assert [request.number for request in run.scheduler.waiting] == [2_999]
    run.run()
    assert {run.finished[number].reason for number in (0, 2_999)} == {"length"}
    assert len(run.finished) == 3_000


def test_a_found_stop_string_is_a_finish_and_drops_the_tokens_beyond_it():
    run = make_core(lag=1)
    run.core.apply([make_add(0, 5, max_tokens=100)])
    for _ in range(6):
        run.step()
    request = run.scheduler.requests[0]
    run.core.apply([FinishRequest(0, "END", 3)])
    assert request.num_output_tokens == 3
    run.run()
    assert (run.finished[0].reason, run.finished[0].stop_reason) == ("stop", "END")


def test_length_limits_never_lag():
    run = make_core(lag=1)
    run.run([make_add(0, 5, max_tokens=3)])
    assert [int(step.num_tokens.sum()) for step in run.executor.steps] == [5, 1, 1]


def test_eos_ends_without_a_stop_reason_and_a_stop_id_names_itself():
    options = {"special_token": every_nth(3, EOS)}
    run = make_core(executor_options=options)
    run.run(
        [
            make_add(0, 5, max_tokens=100),
            make_add(1, 5, max_tokens=100, stop_ids=(EOS,), eos_ids=()),
        ]
    )
    assert (run.finished[0].reason, run.finished[0].stop_reason) == ("stop", None)
    assert (run.finished[1].reason, run.finished[1].stop_reason) == ("stop", EOS)
    assert run.tokens[0][-1] == EOS


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_cannot_be_launched_ends_only_its_requests(lag):
    options = {"faults": Faults(submit={1})}
    run = make_core(lag=lag, executor_options=options, max_num_seqs=2)
    prompt = list(range(100, 112))
    run.core.apply([make_add(n, prompt, max_tokens=6) for n in range(4)])
    run.run()
    reasons = [run.finished[n].reason for n in range(4)]
    assert reasons.count("error") == 2
    for number in range(4):
        if run.finished[number].reason == "length":
            assert run.tokens[number] == run.executor.expected_tokens(prompt, 6)


def test_a_row_with_bad_logits_ends_with_an_error_and_harms_nobody():
    run = make_core(executor_options={"faults": Faults(non_finite={0: 7})})
    run.run([make_add(0, 5), make_add(1, 5)])
    assert (run.finished[0].reason, run.finished[0].error) == ("error", "non-finite logits")
    assert run.finished[1].reason == "length"


def test_retracted_prompts_are_not_counted_as_hits():
    run = make_core(num_blocks=12, block_size=4, max_num_seqs=8)
    run.run([make_add(n, 10, max_tokens=20) for n in range(20)])
    stats = run.scheduler.block_manager.stats
    assert run.scheduler.num_retractions > 0
    assert stats.num_queries == 20 * 10
    assert stats.num_hits == 0


def test_cached_tokens_of_repeated_prompts():
    for length, expected in ((15, 0), (16, 0), (17, 16), (47, 32), (48, 32), (49, 48)):
        run = make_core(block_size=16, num_blocks=16)
        started = []
        for number in range(3):
            run.core.apply([make_add(number, list(range(100, 100 + length)), max_tokens=4)])
            while run.core.has_work:
                outputs = run.step()
                started += [item.num_cached_tokens for item in outputs.started]
        assert started == [0, expected, expected]


def test_hits_stay_inside_one_salt():
    run = make_core(block_size=16, num_blocks=32)
    started = []
    for number, salt in enumerate([None, "a", "b", "a"]):
        run.core.apply([make_add(number, list(range(100, 164)), max_tokens=1, cache_salt=salt)])
        while run.core.has_work:
            started += [item.num_cached_tokens for item in run.step().started]
    assert started == [0, 0, 0, 48]


def test_without_caching_only_the_children_of_one_request_share():
    run = make_core(enable_prefix_caching=False)
    messages = [
        make_add(n, PREFIX, max_tokens=2, private_namespace=group)
        for n, group in ((0, 0), (1, 0), (2, 1))
    ]
    run.core.apply(messages)
    started = run.step().started
    assert [item.num_cached_tokens for item in started] == [0, 44, 0]
    run.run()
    assert count_prompt_tokens(run.executor.steps) == 48 + 4 + 48


def test_no_request_is_lost_behind_a_window_of_deferred_ones():
    run = make_core(
        num_blocks=256, min_deferral_tokens=16, long_prefill_token_threshold=8, max_model_len=512
    )
    shared = list(range(100, 300))
    run.core.apply([make_add(9_999, 4, max_tokens=200)])
    run.step()
    messages = [
        make_add(n, [*shared, 1_000 + n], max_tokens=1) for n in range(ADMISSION_WINDOW + 9)
    ]
    run.run(messages)
    assert len(run.finished) == ADMISSION_WINDOW + 10
    assert count_prompt_tokens(run.executor.steps) == 4 + 201 + ADMISSION_WINDOW + 8


def test_a_status_cannot_change_along_a_forbidden_transition():
    request = Request(make_add(0))
    with pytest.raises(AssertionError, match="cannot become DRAINING"):
        request.move_to(RequestStatus.DRAINING)


def test_the_documented_step():
    scheduler = make_scheduler(block_size=16, num_blocks=64, max_num_batched_tokens=64)
    add_request(scheduler, 0, 32)
    update(scheduler, plan(scheduler))
    half = add_request(scheduler, 1, 100)
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=41)
    update(scheduler, plan(scheduler))
    assert half.num_computed_tokens == 40
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=64)
    add_request(scheduler, 2, [*range(32), *range(200, 218)])
    add_request(scheduler, 3, [*range(32), *range(300, 318)])
    step = plan(scheduler)
    assert step.num_tokens.tolist() == [1, 60, 3]
    update(scheduler, step)
    assert plan(scheduler).num_tokens.tolist() == [1, 1, 47, 15]


def test_a_prompt_is_not_capped_by_prefills_beside_it():
    scheduler = make_scheduler(long_prefill_token_threshold=3, max_num_batched_tokens=64)
    add_request(scheduler, 0, 20)
    add_request(scheduler, 1, 20)
    assert plan(scheduler).num_tokens.tolist() == [20, 20]


def test_blocks_of_a_request_with_bad_logits_are_not_shared_any_more():
    run = make_core(executor_options={"faults": Faults(non_finite={0: 14})})
    run.run([make_add(0, PREFIX[:13])])
    assert run.finished[0].reason == "error"
    outputs = []
    run.core.apply([make_add(1, PREFIX[:13])])
    while run.core.has_work:
        outputs.append(run.step())
    started = [item for output in outputs if output for item in output.started]
    assert started[0].num_cached_tokens == 0
