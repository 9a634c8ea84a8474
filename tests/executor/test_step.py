"""The border between planning and computing carries values, not references to shared state."""

from dataclasses import FrozenInstanceError

import msgspec
import numpy as np
import pytest

from octavo.executor.step import RowSampling, StepResult
from tests.steps import make_row, make_step


def test_the_number_of_sampled_rows_is_counted_from_the_mask():
    step = make_step(0, [(0, 1, 4, True), (3, 8, 0, False), (5, 1, 9, True)])
    assert step.num_sampled == 2


def test_a_step_without_rows_samples_nothing():
    assert make_step(0, []).num_sampled == 0


def test_a_planned_step_cannot_be_changed():
    step = make_step(0, [(0, 1, 4, True)], new=[make_row()])
    with pytest.raises(FrozenInstanceError):
        step.step_id = 1
    with pytest.raises(FrozenInstanceError):
        step.new_rows[0].row = 1


def test_results_do_not_share_their_dictionaries():
    first, second = (StepResult(i, np.zeros(0, dtype=np.int32)) for i in range(2))
    first.row_errors[0] = "non-finite logits"
    assert second.row_errors == {}


def test_sampling_is_greedy_and_without_any_effect_by_default():
    assert RowSampling(seed=0) == RowSampling(
        seed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
    )


def test_sampling_of_a_plain_request_is_a_few_bytes_on_the_wire():
    assert len(msgspec.msgpack.encode(RowSampling(seed=7))) < 10
