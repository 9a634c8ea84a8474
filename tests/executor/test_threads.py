"""How many threads compute a step."""

import pytest
import torch

from octavo.executor import threads
from octavo.executor.threads import MEASURED_ROWS, StepThreads, measure_threads


@pytest.fixture
def torch_threads(monkeypatch):
    """Torch's number of threads, two to begin with, without any thread."""
    state = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: state[-1])
    monkeypatch.setattr(torch, "set_num_threads", state.append)
    return state


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    return now


def test_a_step_has_its_threads_and_gives_them_back(torch_threads):
    chosen = StepThreads(num_threads=2, min_tokens=16)
    for num_tokens, expected in ((15, 1), (16, 2)):
        with chosen.use(num_tokens):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2


def test_a_step_that_fails_gives_them_back_too(torch_threads):
    with pytest.raises(RuntimeError, match="out"), StepThreads(2, 16).use(1):
        raise RuntimeError("out")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("first", [*MEASURED_ROWS, None])
def test_the_second_thread_comes_where_it_gains(first, torch_threads, clock):
    def run(num_rows):
        gains = torch.get_num_threads() == 2 and first is not None and num_rows >= first
        clock[0] += 0.5 if gains else 1.0

    *_, found = measure_threads(run)
    assert found == StepThreads(2, first or MEASURED_ROWS[-1] + 1)
    assert torch.get_num_threads() == 2


def test_a_core_that_is_away_for_a_while_is_waited_for(torch_threads, clock):
    runs = []

    def run(num_rows):
        runs.append(num_rows)
        clock[0] += 0.5 if torch.get_num_threads() == 2 and len(runs) > 12 else 1.0

    *_, found = measure_threads(run)
    assert found == StepThreads(2, MEASURED_ROWS[0])
    assert len(runs) == 14, "it stops when it knows"


def test_one_thread_needs_no_measurement(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (found,) = measure_threads(None)
    assert found.num_threads == 1


def test_a_measurement_can_be_interrupted_after_every_run(torch_threads):
    runs = []
    for measured, found in enumerate(measure_threads(runs.append), start=1):
        assert torch.get_num_threads() == 2
        assert len(runs) == measured or found


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (StepThreads(1, 17), "threads of a step: 1"),
        (StepThreads(2, 1), "threads of a step: 2"),
        (StepThreads(2, 17), "threads of a step: 2, 1 for fewer than 17 tokens"),
    ],
)
def test_the_log_says_it_in_words(chosen, text):
    assert str(chosen) == text
