"""A row belongs to one request and holds all that a step must know of it."""

import numpy as np
import pytest

from octavo.executor.rows import Rows
from tests.steps import make_row


def make_rows():
    return Rows(4, max_tokens=32, max_blocks=8)


def test_a_new_row_is_written_whole():
    rows = make_rows()
    first = {"token_ids": range(20), "blocks": (1, 2, 3), "num_logprobs": 2}
    rows.write(make_row(2, **first, temperature=1.0, logit_bias=((3, 1.0),)))
    rows.release(2)
    rows.write(make_row(2, token_ids=[7, 8], num_prompt=1, blocks=(5,)))
    assert rows.token_ids[2, : rows.num_tokens[2]].tolist() == [7, 8]
    assert rows.block_tables[2, : rows.num_blocks[2]].tolist() == [5]
    assert rows.num_prompt_tokens[2] == 1
    assert rows.num_logprobs[2] is None
    assert rows.edits[2] is None
    assert rows.takes_maximum[2]


def test_blocks_and_tokens_are_appended_to_their_rows():
    rows = make_rows()
    for row in (0, 1, 3):
        rows.write(make_row(row, token_ids=[row], blocks=(row,)))
    rows.grow(1, (6, 7))
    rows.append(np.array([3, 1], np.int32), np.array([30, 10], np.int32))
    assert rows.block_tables[1, : rows.num_blocks[1]].tolist() == [1, 6, 7]
    assert [rows.token_ids[row, : rows.num_tokens[row]].tolist() for row in (0, 1, 3)] == [
        [0],
        [1, 10],
        [3, 30],
    ]


def test_a_row_has_one_request_at_a_time():
    rows = make_rows()
    rows.write(make_row(1))
    with pytest.raises(AssertionError, match="row 1 is taken by two requests"):
        rows.write(make_row(1, number=2))
    rows.release(1)
    with pytest.raises(AssertionError, match="row 1 is released but nobody has it"):
        rows.release(1)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words_ids": ((1,),)},
        {"min_tokens": 1, "held_back_ids": (2,)},
    ],
)
def test_a_row_takes_the_maximum_unless_something_may_change_it(params):
    rows = make_rows()
    rows.write(make_row(0, **params))
    rows.write(make_row(1, top_k=5, top_p=0.5, min_p=0.1, held_back_ids=(2,), num_logprobs=1))
    assert rows.takes_maximum[:2].tolist() == [False, True]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_kept(seed):
    rows = make_rows()
    rows.write(make_row(0, seed=seed))
    assert int(rows.sampling.seed[0]) == seed % 2**64
