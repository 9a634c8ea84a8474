"""A step's inputs are what its rows hold, in the order of the step."""

import numpy as np

from octavo.executor.input_batch import gather_inputs
from octavo.executor.rows import Rows
from tests.steps import make_row, make_step


def make_rows(*new_rows):
    rows = Rows(8, max_tokens=32, max_blocks=8)
    for new in new_rows:
        rows.write(new)
    return rows


def test_inputs_of_a_chunk_beside_a_decode():
    chunk = make_row(5, token_ids=range(100, 112), blocks=(7, 3, 6))
    decode = make_row(2, number=1, token_ids=range(50, 55), blocks=(4, 1))
    step = make_step(0, [(5, 6, 3, False), (2, 1, 4, True)])
    batch = gather_inputs(make_rows(chunk, decode), step, block_size=4)
    inputs = batch.attention
    assert batch.input_ids.tolist() == [103, 104, 105, 106, 107, 108, 54]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 7, 8, 4]
    assert inputs.slot_mapping.tolist() == [31, 12, 13, 14, 15, 24, 4]
    assert inputs.query_start.tolist() == [0, 6, 7]
    assert inputs.context_lengths.tolist() == [9, 5]
    assert inputs.block_tables[0].tolist() == [7, 3, 6]
    assert inputs.block_tables[1, :2].tolist() == [4, 1]
    assert batch.sampled_rows.tolist() == [2]
    assert batch.sampled_tokens.tolist() == [6]


def test_a_token_that_the_host_has_not_seen_comes_from_the_row():
    rows = make_rows(make_row(0, token_ids=[9, 8]))
    rows.append(np.array([0], np.int32), np.array([77], np.int32))
    batch = gather_inputs(rows, make_step(0, [(0, 1, 2, True)]), block_size=4)
    assert batch.input_ids.tolist() == [77]


def test_inputs_are_copies_of_the_rows():
    rows = make_rows(make_row(0, token_ids=[9, 8], num_prompt_logprobs=1))
    batch = gather_inputs(rows, make_step(0, [(0, 2, 0, True)]), block_size=4)
    rows.release(0)
    rows.write(make_row(0, number=1, token_ids=[1, 2], blocks=(5,)))
    assert batch.input_ids.tolist() == [9, 8]
    assert batch.attention.block_tables.tolist() == [[0]]
    assert batch.prompt_spans[0].targets.tolist() == [8]


def test_slots_are_counted_in_64_bits():
    rows = make_rows(make_row(0, token_ids=[9], blocks=(2**30,)))
    batch = gather_inputs(rows, make_step(0, [(0, 1, 0, True)]), block_size=64)
    assert batch.attention.slot_mapping.tolist() == [2**36]


def test_states_are_wanted_of_the_tokens_behind_which_one_is_sampled_or_of_all():
    asking = make_row(1, token_ids=range(10), num_prompt=6, num_prompt_logprobs=3)
    rows = make_rows(make_row(0, token_ids=range(5)), asking)
    wanted = {
        ((0, 5, 0, True), (1, 1, 6, False)): [4],
        ((0, 2, 0, False),): [0],  # at least one
        ((0, 1, 4, True), (1, 1, 9, True)): None,
        ((0, 5, 0, True), (1, 4, 0, False)): None,  # prompt log-probabilities
    }
    for scheduled, expected in wanted.items():
        found = gather_inputs(rows, make_step(0, list(scheduled)), block_size=4).wanted
        assert (None if found is None else found.tolist()) == expected


def test_prompt_spans_stop_before_the_prompts_last_token():
    asking = make_row(1, token_ids=range(10), num_prompt=6, num_prompt_logprobs=3)
    rows = make_rows(make_row(0, token_ids=range(5)), asking)
    first = gather_inputs(
        rows, make_step(0, [(0, 5, 0, True), (1, 4, 0, False)]), block_size=4
    ).prompt_spans
    second = gather_inputs(rows, make_step(1, [(1, 4, 4, False)]), block_size=4).prompt_spans
    third = gather_inputs(rows, make_step(2, [(1, 2, 8, True)]), block_size=4).prompt_spans
    assert [(span.index, span.first_token, span.targets.tolist()) for span in first] == [
        (1, 5, [1, 2, 3, 4])
    ]
    assert [span.targets.tolist() for span in second] == [[5]]
    assert third == ()
