"""The executor in the caller's process keeps the order of steps and results."""

import pytest

from octavo.config import EngineConfig
from octavo.executor.in_process import create_executor
from tests.executor.by_hand import make_executor
from tests.models.oracle import source_of
from tests.steps import PROMPT, make_row, make_step

FIRST = make_step(0, [(0, 6, 0, True)], new=[make_row()])
SECOND, THIRD = make_step(1, [(0, 1, 6, True)]), make_step(2, [(0, 1, 7, True)])


def test_a_result_may_be_read_one_step_later(llama):
    executor = make_executor(llama.folder, lag=1)
    handles = [executor.submit(FIRST), executor.submit(SECOND)]
    tokens = [int(handle.result().token_ids[0]) for handle in handles]
    assert tokens == llama.generate(PROMPT, 2)


@pytest.mark.parametrize("lag", [0, 1])
def test_more_unread_results_than_the_lag_are_refused(llama, lag):
    executor = make_executor(llama.folder, lag=lag)
    steps = [FIRST, SECOND, THIRD]
    for step in steps[: lag + 1]:
        executor.submit(step)
    with pytest.raises(AssertionError, match=f"{lag + 1} results are unread, lag is {lag}"):
        executor.submit(steps[lag + 1])


def test_a_result_is_read_once(llama):
    handle = make_executor(llama.folder).submit(FIRST)
    assert handle.result().step_id == 0
    with pytest.raises(AssertionError, match="result of step 0 asked twice"):
        handle.result()


def test_results_are_read_in_order(llama):
    executor = make_executor(llama.folder, lag=1)
    executor.submit(FIRST)
    with pytest.raises(AssertionError, match="in the order of submission"):
        executor.submit(SECOND).result()


def test_nothing_runs_after_shutdown(llama):
    executor = make_executor(llama.folder)
    executor.shutdown()
    with pytest.raises(AssertionError, match="submit after shutdown"):
        executor.submit(FIRST)


@pytest.mark.parametrize(("setting", "lag"), [(None, 0), (False, 0), (True, 1)])
def test_overlap_is_off_on_a_cpu_unless_asked_for(llama, setting, lag):
    config = EngineConfig(async_scheduling=setting, num_gpu_blocks_override=8, device="cpu")
    executor = create_executor(config, source_of(llama.folder))
    assert executor._lag == lag
    assert executor.info.num_blocks == 8
