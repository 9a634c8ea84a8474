"""What is told of requests after their end."""

import pytest

from octavo.engine.messages import AbortRequests, ExplainRequest
from octavo.executor.step import RowSampling
from tests.engine.requests import make_add, make_core


def explain(run, number):
    run.core.apply([ExplainRequest(str(number), ticket=1)])
    return run.step().explanations[0].requests


@pytest.mark.parametrize("lag", [0, 1])
def test_an_ended_request_is_explained_with_all_that_was_computed_for_it(lag):
    run = make_core(lag=lag, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=8)
    prompt = list(range(100, 108))
    run.run([make_add(n, [*prompt, n], max_tokens=12) for n in range(4)])
    assert run.scheduler.num_retractions > 0
    entries = [entry for n in range(4) for entry in explain(run, n)]
    num_computed = sum(int(step.num_tokens.sum()) for step in run.executor.steps)
    assert sum(entry.num_computed_tokens for entry in entries) == num_computed
    assert any(entry.num_cached_tokens for entry in entries)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["answered", "retracted", "scored", "aborted"])
def test_no_time_is_kept_of_a_request_behind_the_next_result(lag, kind):
    run = make_core(lag=lag, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=8)
    length, max_tokens = {"retracted": (9, 12), "scored": (9, 0)}.get(kind, (9, 3))
    scores = RowSampling(seed=0, num_prompt_logprobs=0) if kind == "scored" else None
    fields = {"max_tokens": max_tokens, "sampling": scores, "skip_reading_prefix_cache": True}
    run.core.apply([make_add(n, length, **fields) for n in range(4)])
    if kind == "aborted":
        run.step()
        run.core.apply([AbortRequests((0, 1, 2, 3))])
    run.run()
    assert bool(run.scheduler.num_retractions) == (kind == "retracted")
    run.run([make_add(4, 1, max_tokens=1)])
    assert run.core._log._tokenless == []
    assert run.core._log._first_token_s == {}
