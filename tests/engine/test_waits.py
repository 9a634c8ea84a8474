"""Whatever keeps a request waiting has a name and numbers, and all that wait are counted."""

import pytest

from octavo.engine.scheduler import ADMISSION_WINDOW
from octavo.engine.waits import Holdups, WaitKind, WaitReason
from tests.engine.requests import add_request, make_add, make_core, make_scheduler

PREFIX = list(range(100, 148))


def add_all(scheduler, count, prompt=20, **fields):
    for number in range(count):
        add_request(scheduler, number, prompt, **fields)
    scheduler.plan(0.0)


def describe(scheduler, number):
    reason = scheduler.holdups.reason(number)
    return reason.kind, reason.text


def count(scheduler):
    return scheduler.holdups.count(len(scheduler.waiting), scheduler.requests)


def test_who_lacks_blocks_and_who_is_behind_it():
    scheduler = make_scheduler(num_blocks=8)
    add_all(scheduler, 4)
    lack = "needs 5 blocks and 0 for the growth of others, 3 available"
    assert describe(scheduler, 1) == ("blocks", lack)
    assert describe(scheduler, 3) == ("blocks", f"behind request 1, which {lack}")
    assert count(scheduler) == {"blocks": 3}


def test_rows_that_are_all_taken():
    scheduler = make_scheduler(max_num_seqs=2)
    add_all(scheduler, 5)
    for _ in range(2):  # they are taken when the plan begins, or by those that it admits
        assert describe(scheduler, 4) == ("rows", "max_num_seqs (2) requests are running")
        assert count(scheduler) == {"rows": 3}
        scheduler.plan(0.0)


def test_a_step_without_tokens_to_spare():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add_all(scheduler, 3)
    assert describe(scheduler, 2) == ("tokens", "max_num_batched_tokens (16) of the step are taken")
    assert count(scheduler) == {"tokens": 2}


def test_a_deferred_request_is_named_and_those_behind_it_have_their_own_reason():
    scheduler = make_scheduler(
        min_deferral_tokens=16, long_prefill_token_threshold=8, max_num_seqs=3
    )
    add_all(scheduler, 1, 4, max_tokens=100)
    add_request(scheduler, 1, [*PREFIX, 1_000])
    scheduler.plan(0.0)
    add_request(scheduler, 2, [*PREFIX, 2_000])
    for number in (3, 4):
        add_request(scheduler, number, 4)
    scheduler.plan(0.0)
    assert describe(scheduler, 2) == ("deferred", "deferred: prefix of 1")
    assert describe(scheduler, 4)[0] == "rows"
    assert count(scheduler) == {"deferred": 1, "rows": 1}


def test_a_plan_that_retracts_admits_nobody():
    run = make_core(num_blocks=4, max_num_seqs=3)
    run.core.apply([make_add(0, 6, max_tokens=8), make_add(1, 6, max_tokens=8)])
    while run.scheduler.num_retractions == 0:
        run.step()
    assert describe(run.scheduler, 1)[1] == "running requests took all blocks: one was retracted"
    assert count(run.scheduler) == {"blocks": 1}


def test_more_before_it_than_a_plan_looks_at():
    scheduler = make_scheduler(min_deferral_tokens=16, long_prefill_token_threshold=8)
    add_all(scheduler, 1, 4, max_tokens=100)
    add_request(scheduler, 1, [*PREFIX, 1_000])
    scheduler.plan(0.0)
    for number in range(2, ADMISSION_WINDOW + 4):
        add_request(scheduler, number, [*PREFIX, 1_000 + number])
    scheduler.plan(0.0)
    assert describe(scheduler, ADMISSION_WINDOW + 2)[0] == "turn"
    assert count(scheduler) == {"deferred": ADMISSION_WINDOW, "turn": 2}


@pytest.mark.parametrize("lag", [0, 1])
def test_counts_add_up_to_what_waits(lag):
    run = make_core(lag=lag, num_blocks=6, max_num_seqs=2, min_deferral_tokens=4)
    run.core.apply([make_add(n, [*PREFIX[: 4 * (n % 3)], n], max_tokens=9) for n in range(12)])
    while run.core.has_work:
        outputs = run.step()
        if outputs:
            assert sum(outputs.stats.num_waiting_by_reason.values()) == outputs.stats.num_waiting


def test_a_named_request_that_has_ended_is_not_counted():
    holdups = Holdups()
    holdups.hold(1, WaitReason(WaitKind.RESULT, ""))
    holdups.rest = WaitReason(WaitKind.ROWS, "")
    assert holdups.count(2, unfinished={2, 3}) == {"rows": 2}
