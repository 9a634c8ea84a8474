"""What is told of requests after their end."""

import pytest

from octavo.engine.messages import ExplainRequest
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
