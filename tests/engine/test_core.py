"""What the core reports: messages in order, explanations, stalls that are named."""

import pytest

from octavo.engine.core import MAX_FAILED_LAUNCHES
from octavo.engine.messages import AbortRequests, ExplainRequest
from octavo.engine.request_log import NUM_ENDED_KEPT
from tests.engine.requests import make_add, make_core
from tests.fake_executor import Faults


def explain(run, request_id, ticket=1):
    run.core.apply([ExplainRequest(str(request_id), ticket)])
    (explanation,) = run.step().explanations
    assert explanation.ticket == ticket
    return explanation.requests


def test_a_waiting_request_is_explained_with_its_place_and_the_numbers():
    run = make_core(num_blocks=8)
    run.core.apply([make_add(n, 20, max_tokens=10) for n in range(3)])
    run.step()
    (explained,) = explain(run, 2)
    assert (explained.state, explained.place_in_queue) == ("waiting", 1)
    (first,) = explain(run, 1)
    assert first.place_in_queue == 0
    assert first.wait_reason.startswith("needs 5 blocks")
    assert explained.wait_reason == f"behind request 1, which {first.wait_reason}"


def test_a_running_request_is_explained_with_its_counts_and_times():
    run = make_core()
    run.core.apply([make_add(0, 9, max_tokens=10)])
    run.step()
    (explained,) = explain(run, 0)
    assert explained.state == "running"
    assert explained.num_computed_tokens == 10
    assert explained.num_output_tokens == 2
    assert explained.first_token_s is not None
    assert explained.ended_s is None


def test_the_ended_are_explained_for_a_while():
    run = make_core()
    run.run([make_add(0, 5, max_tokens=2)])
    (explained,) = explain(run, 0)
    assert (explained.state, explained.finish_reason) == ("finished", "length")
    for number in range(1, NUM_ENDED_KEPT + 1):
        run.core.apply([make_add(number), AbortRequests((number,))])
        run.step()
    assert explain(run, 0) == []


def test_children_of_one_request_are_explained_together():
    run = make_core()
    messages = [make_add(0), make_add(1)]
    run.core.apply([message_with_id(message, "a") for message in messages])
    assert [entry.number for entry in explain(run, "a")] == [0, 1]


def message_with_id(message, request_id):
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**fields, "request_id": request_id})


def test_an_unknown_request_is_explained_by_nothing():
    assert explain(make_core(), "nobody") == []


def test_the_oldest_waiting_request_is_named_in_the_statistics():
    run = make_core(num_blocks=8)
    run.core.apply([make_add(n, 20, max_tokens=10) for n in range(2)])
    stats = run.step().stats
    assert stats.oldest_waiting == 1
    assert "needs 5 blocks" in stats.oldest_waiting_reason


def test_a_result_that_cannot_be_read_kills_the_core():
    run = make_core(executor_options={"faults": Faults(result={0})})
    run.core.apply([make_add(0)])
    with pytest.raises(RuntimeError, match="on demand"):
        run.step()


def test_a_core_with_nothing_to_plan_and_nothing_to_await_stops_with_the_numbers():
    run = make_core()
    run.core.apply([make_add(0)])
    run.scheduler._admit = lambda *_, **__: None
    with pytest.raises(AssertionError, match="0 running, 1 waiting"):
        run.core.step()


def test_a_device_that_launches_nothing_any_more_kills_the_core():
    run = make_core(executor_options={"faults": Faults(submit=range(100))})
    for number in range(MAX_FAILED_LAUNCHES):
        run.run([make_add(number)])
        assert run.finished[number].reason == "error"
    with pytest.raises(RuntimeError, match="on demand"):
        run.run([make_add(99)])


def test_steps_in_the_middle_of_a_prompt_are_reported():
    run = make_core(max_num_batched_tokens=4)
    run.core.apply([make_add(0, 12)])
    assert run.step().stats.num_tokens_scheduled == 4
    assert run.step().stats.num_tokens_scheduled == 4


class TickingClock:
    """Every reading is a millisecond after the one before."""

    def __init__(self):
        self.now_ms = 0

    def __call__(self):
        self.now_ms += 1
        return self.now_ms / 1000


@pytest.mark.parametrize("lag", [0, 1])
def test_the_parts_of_a_step_are_timed_where_there_are_any(lag):
    run = make_core(lag=lag)
    run.core._clock = TickingClock()
    run.core.apply([make_add(0, max_tokens=2)])
    first, last = run.step().times, run.step().times
    assert first.plan == first.launch == pytest.approx(0.001)
    assert (first.wait is None) is (lag == 1)
    assert last.wait == pytest.approx(0.001)
    assert last.update >= last.wait


def test_retractions_are_counted_by_who_needed_the_blocks():
    run = make_core(num_blocks=4)
    run.core.apply([make_add(0, 6, max_tokens=8), make_add(1, 6, max_tokens=8)])
    while run.core.has_work:
        outputs = run.step()
    assert outputs.stats.num_retractions == {"others_growth": 1}
    run = make_core(num_blocks=4)
    run.core.apply([make_add(0, 5, max_tokens=10), make_add(1, 8, max_tokens=8)])
    while run.core.has_work:
        outputs = run.step()
    assert outputs.stats.num_retractions == {"own_growth": 1}


def test_rows_without_finite_logits_are_counted():
    run = make_core(executor_options={"faults": Faults(non_finite={1: 6})})
    run.core.apply([make_add(0), make_add(1)])
    while run.core.has_work:
        outputs = run.step()
    assert outputs.stats.num_failed_rows == 1


def test_misses_are_told_by_their_reasons():
    run = make_core(num_blocks=8)
    messages = [
        make_add(0, list(range(10, 27)), max_tokens=2),
        make_add(1, list(range(10, 27)), max_tokens=2),
        make_add(2, 28, max_tokens=2),
        make_add(3, list(range(10, 27)), max_tokens=2),
        make_add(4, list(range(10, 27)), max_tokens=2, skip_reading_prefix_cache=True),
    ]
    for message in messages:
        run.run([message])
    run.core.apply([ExplainRequest("0", 1)])
    stats = run.step().stats
    assert stats.prefix_misses == {"cold": 40, "tail": 7, "evicted": 16, "recompute": 17}
    assert sum(stats.prefix_misses.values()) + stats.prefix_hits == stats.prefix_queries
