"""How many threads compute a step."""

import pytest
import torch

from octavo.executor import threads
from octavo.executor.threads import MAX_TRIED_TOKENS, NUM_AGREEING, TRUST_S, StepThreads

SINGLE_S = 1 / 64
NUM_TRUSTED = int(TRUST_S / SINGLE_S)


@pytest.fixture
def torch_threads(monkeypatch):
    """Torch's number of threads, two to begin with, without any thread."""
    state = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: state[-1])
    monkeypatch.setattr(torch, "set_num_threads", state.append)
    return state


@pytest.fixture
def compute(torch_threads, monkeypatch):
    """Returns a function that computes steps and returns how many threads each had.

    One thread takes ``single_s`` for a step, two ``two`` times that.
    """
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])

    def compute(step_threads, num_steps, *, num_tokens, two, single_s=SINGLE_S):
        had = []
        for _ in range(num_steps):
            with step_threads.use(num_tokens):
                had.append(torch.get_num_threads())
                now[0] += single_s * (1 if had[-1] == 1 else two)
            assert torch.get_num_threads() == 2, "a step gives its threads back"
        return had

    return compute


def test_one_thread_and_all_take_turns_until_it_is_known_which_is_faster(compute):
    chosen = StepThreads()
    assert compute(chosen, 2 * NUM_AGREEING, num_tokens=4, two=0.5) == [1, 2] * NUM_AGREEING
    assert compute(chosen, 3, num_tokens=4, two=0.5) == [2, 2, 2]


@pytest.mark.parametrize(("two", "expected"), [(0.5, 2), (0.9, 2), (0.95, 1), (8.0, 1)])
def test_all_threads_compute_where_they_gain(compute, two, expected):
    chosen = StepThreads()
    *_, last = compute(chosen, 2 * NUM_AGREEING + 1, num_tokens=16, two=two)
    assert last == expected


def test_steps_of_similar_sizes_share_what_was_found(compute):
    chosen = StepThreads()
    compute(chosen, 2 * NUM_AGREEING, num_tokens=8, two=0.5)
    assert compute(chosen, 2, num_tokens=15, two=0.5) == [2, 2]
    assert compute(chosen, 2, num_tokens=16, two=0.5) == [1, 2]


def test_what_was_found_is_tried_again_later(compute):
    """Another process has come, or gone."""
    chosen = StepThreads()
    compute(chosen, 2 * NUM_AGREEING, num_tokens=1, two=8.0)
    assert compute(chosen, NUM_TRUSTED, num_tokens=1, two=0.5) == [1] * NUM_TRUSTED
    compute(chosen, 2 * NUM_AGREEING, num_tokens=1, two=0.5)
    assert compute(chosen, 1, num_tokens=1, two=0.5) == [2]


def test_trials_cost_little_where_one_thread_takes_far_longer(compute):
    """Sixty-four cores, and steps of many tokens."""
    chosen = StepThreads()
    had = compute(chosen, 5_000, num_tokens=63, two=1 / 64, single_s=2.0)
    assert had.count(1) < 0.1 * had.count(2) / 64


@pytest.mark.parametrize("stopped", range(2 * NUM_AGREEING))
def test_a_trial_within_which_the_process_was_stopped_is_not_trusted_the_longer(compute, stopped):
    chosen = StepThreads()
    compute(chosen, stopped, num_tokens=1, two=0.5)
    compute(chosen, 1, num_tokens=1, two=1, single_s=3_600.0)
    compute(chosen, 2 * NUM_AGREEING, num_tokens=1, two=0.5)
    assert 1 in compute(chosen, 2 * NUM_TRUSTED + 1, num_tokens=1, two=0.5)


@pytest.mark.parametrize(("slow", "expected"), [([0, 2], 2), ([0, 1, 4], 1)])
def test_a_core_that_is_away_for_a_while_decides_nothing(compute, slow, expected):
    chosen = StepThreads()
    for pair in range(5):
        compute(chosen, 2, num_tokens=1, two=8.0 if pair in slow else 0.5)
    assert compute(chosen, 1, num_tokens=1, two=0.5) == [expected]


def test_long_steps_and_empty_ones_have_all_threads(compute):
    chosen = StepThreads()
    assert compute(chosen, 2, num_tokens=MAX_TRIED_TOKENS + 1, two=8.0) == [2, 2]
    assert compute(chosen, 2, num_tokens=0, two=8.0) == [2, 2]


def test_where_there_is_one_thread_nothing_is_tried(torch_threads):
    torch_threads.append(1)
    with StepThreads().use(1):
        assert torch_threads == [2, 1]


def test_a_step_that_fails_gives_its_threads_back_and_is_not_counted(compute):
    chosen = StepThreads()
    with pytest.raises(RuntimeError, match="out"), chosen.use(1):
        raise RuntimeError("out")
    assert compute(chosen, 2, num_tokens=1, two=0.5) == [1, 2]


def test_the_log_says_what_was_found_once(compute, caplog):
    caplog.set_level("INFO")
    chosen = StepThreads()
    for two in (0.5, 0.5, 8.0):
        compute(chosen, 2 * NUM_AGREEING + int(NUM_TRUSTED / min(two, 1)), num_tokens=5, two=two)
    assert caplog.messages == [
        "threads of steps of 4 to 7 tokens: all",
        "threads of steps of 4 to 7 tokens: one",
    ]
