"""A paused core plans nothing and loses nothing; what has been launched runs out."""

import pytest

from octavo.engine.messages import (
    AbortRequests,
    Done,
    ExpireRequests,
    ExplainRequest,
    PauseScheduling,
    ResetPrefixCache,
    ResumeScheduling,
)
from octavo.engine.replay import replay
from tests.engine.requests import make_add, make_core

REQUESTS = [make_add(number, 9, max_tokens=12) for number in range(5)]


def make_paused(*, lag=0, num_steps=3, **fields):
    """Run some steps, pause, and read what was launched before."""
    run = make_core(lag=lag, max_num_seqs=2, **fields)
    run.core.apply(REQUESTS)
    for _ in range(num_steps):
        run.step()
    run.core.apply([PauseScheduling(7)])
    while run.core.has_work:
        run.step()
    return run


@pytest.mark.parametrize("lag", [0, 1])
def test_a_paused_core_has_nothing_to_do_and_keeps_everything(lag):
    run = make_paused(lag=lag)
    scheduler = run.scheduler
    num_steps = len(run.executor.steps)
    blocks = [scheduler.block_manager.block_ids(number) for number in scheduler.running]
    assert run.core.step() is None
    assert len(run.executor.steps) == num_steps
    assert list(scheduler.running) == [0, 1]
    assert [request.number for request in scheduler.waiting] == [2, 3, 4]
    assert all(blocks)
    run.core.apply([ResumeScheduling()])
    run.step()
    assert [scheduler.block_manager.block_ids(n)[:3] for n in (0, 1)] == [b[:3] for b in blocks]


def run_with_pauses(*, lag):
    """Pause after every step, and read what was launched before."""
    run = make_core(lag=lag, max_num_seqs=2)
    run.core.apply(REQUESTS)
    while run.scheduler.has_unfinished_requests:
        run.step()
        run.core.apply([PauseScheduling()])
        while run.core.has_work:
            run.step()
        run.core.apply([ResumeScheduling()])
    run.run()
    return run


@pytest.mark.parametrize("lag", [0, 1])
def test_pauses_change_no_token_and_the_journal_replays(lag):
    run = run_with_pauses(lag=lag)
    assert run.tokens == make_core(lag=lag, max_num_seqs=2).run(REQUESTS)
    journal = run.scheduler.journal
    assert replay([journal.config_record, *journal.records]) == len(journal.records) + 1


def test_without_overlap_pauses_leave_no_trace_in_the_journal():
    undisturbed = make_core(max_num_seqs=2)
    undisturbed.run(REQUESTS)
    run = run_with_pauses(lag=0)
    empty = ("plan", None)  # made to no purpose, after the last resumption
    records = [r for r in run.scheduler.journal.records if r != empty]
    assert records == [r for r in undisturbed.scheduler.journal.records if r != empty]


@pytest.mark.parametrize("message", [PauseScheduling(3), ResumeScheduling(3)])
def test_pausing_and_resuming_twice_is_doing_it_once(message):
    run = make_core()
    run.core.apply([message, message])
    outputs = run.step()
    assert outputs.done == [Done(3), Done(3)]
    assert outputs.stats.is_paused is isinstance(message, PauseScheduling)
    assert not run.core.has_work
    run.core.apply([ResumeScheduling()])
    assert run.run([make_add(0, max_tokens=3)])[0]


def test_who_comes_in_a_pause_waits_for_its_end():
    run = make_core()
    run.core.apply([PauseScheduling(1), make_add(0, max_tokens=3)])
    stats = run.step().stats
    assert (stats.num_waiting, stats.num_waiting_by_reason) == (1, {"pause": 1})
    assert stats.oldest_waiting_reason == "the engine is paused"
    assert not run.core.has_work
    run.core.apply([make_add(1, max_tokens=3)])
    assert run.step().stats.num_waiting == 2
    assert not run.core.has_work
    run.core.apply([ResumeScheduling(2)])
    run.run()
    assert [run.finished[number].reason for number in (0, 1)] == ["length", "length"]


def test_everybody_is_explained_by_the_pause():
    run = make_paused()
    for number, state in ((0, "running"), (3, "waiting")):
        run.core.apply([ExplainRequest(str(number), 1)])
        (explanation,) = run.step().explanations
        (entry,) = explanation.requests
        assert (entry.state, entry.wait_reason) == (state, "the engine is paused")
    run.core.apply([ResumeScheduling(), ExplainRequest("0", 1)])
    (explanation,) = run.step().explanations
    assert explanation.requests[0].wait_reason is None


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("create", [AbortRequests, lambda numbers: ExpireRequests(numbers, "late")])
def test_ends_from_outside_are_reported_in_a_pause(lag, create):
    run = make_paused(lag=lag)
    run.core.apply([create((0, 3, 99))])
    outputs = run.step()
    assert {report.number for report in outputs.finished} == {0, 3}
    assert outputs.stats.num_running == 1
    assert not run.core.has_work
    run.core.apply([ResumeScheduling()])
    run.run()
    assert [run.finished[number].reason for number in (1, 2, 4)] == ["length"] * 3
    assert run.scheduler.block_manager.pool.num_used == 0


def test_the_cache_can_be_dropped_in_a_pause_but_not_what_is_in_use():
    run = make_core(num_blocks=32)
    run.run([make_add(9, 16, max_tokens=2)])
    run.core.apply([make_add(0, 16, max_tokens=12)])
    run.step()
    run.core.apply([PauseScheduling(), ResetPrefixCache(1)])
    assert run.step().done == [Done(1, num_blocks_dropped=4)]
    assert run.scheduler.block_manager.pool.num_used == 4
    run.core.apply([ResumeScheduling()])
    assert len(run.run()[0]) == 12


def test_a_core_can_be_paused_before_it_has_ever_planned():
    run = make_core()
    run.core.apply([PauseScheduling(1)])
    assert run.step().stats.is_paused
    run.core.apply(REQUESTS)
    assert run.step().stats.num_waiting == len(REQUESTS)
    assert not run.core.has_work
    run.core.apply([ResumeScheduling(2)])
    run.run()
    assert len(run.finished) == len(REQUESTS)
