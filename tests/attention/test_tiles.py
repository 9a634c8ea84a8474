"""Which queries attend together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.backend import AttentionInputs
from octavo.attention.tiles import MAX_TILE_QUERIES, Prompt, find_tiles

BLOCK_SIZE = 16


def make_inputs(rows):
    """Rows of (tokens of this step, context with them), each in blocks of its own."""
    counts = torch.tensor([count for count, _ in rows])
    lengths = torch.tensor([length for _, length in rows])
    num_blocks = -(-int(lengths.max()) // BLOCK_SIZE)
    positions = [torch.arange(length - count, length) for count, length in rows]
    return AttentionInputs(
        query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        context_lengths=lengths.int(),
        block_tables=torch.arange(len(rows) * num_blocks).view(len(rows), -1).int(),
        positions=torch.cat(positions).int(),
        slot_mapping=torch.zeros(int(counts.sum())).long(),
    )


def cut(rows, *, window=None, max_slots=10_000):
    inputs = make_inputs(rows)
    return list(find_tiles(inputs, window=window, block_size=BLOCK_SIZE, max_slots=max_slots))


def list_tokens(tile):
    if isinstance(tile, Prompt):
        return list(range(tile.tokens.start, tile.tokens.stop))
    return tile.tokens.tolist()


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 300)), min_size=1, max_size=12),
    st.sampled_from([None, 1, 50]),
    st.integers(1, 2_000),
)
def test_each_token_is_in_one_tile(rows, window, max_slots):
    rows = [(count, count + computed) for count, computed in rows]
    tiles = cut(rows, window=window, max_slots=max_slots)
    tokens = sorted(token for tile in tiles for token in list_tokens(tile))
    assert tokens == list(range(sum(count for count, _ in rows)))
    for tile in tiles:
        if not isinstance(tile, Prompt) and tile.num_rows > 1:
            assert len(tile.slots) <= max_slots


def test_rows_of_similar_lengths_attend_at_once_in_their_order():
    (tile,) = cut([(1, 200), (1, 100), (1, 190)])
    assert list_tokens(tile) == [0, 1, 2]
    assert tile.bias is not None


def test_short_rows_are_not_filled_up_to_a_long_one():
    assert [list_tokens(tile) for tile in cut([(1, 100), (1, 4_000), (1, 90)])] == [[1], [0, 2]]


def test_rows_of_one_length_need_no_mask():
    (tile,) = cut([(1, 64), (1, 64)])
    assert tile.bias is None


def test_a_prompt_that_begins_reads_nothing_from_the_pool():
    (tile,) = cut([(40, 40)])
    assert tile == Prompt(slice(0, 40), 40)


@pytest.mark.parametrize(("row", "window"), [((40, 41), None), ((40, 40), 39)])
def test_a_chunk_and_a_windowed_prompt_are_gathered(row, window):
    (tile,) = cut([row], window=window)
    assert list_tokens(tile) == list(range(40))


def test_a_long_chunk_is_cut():
    tiles = cut([(2 * MAX_TILE_QUERIES + 1, 1_000)])
    assert [len(list_tokens(tile)) for tile in tiles] == [MAX_TILE_QUERIES, MAX_TILE_QUERIES, 1]


def test_a_window_bounds_what_is_read():
    (tile,) = cut([(1, 100)], window=10)
    assert tile.slots.tolist() == list(range(90, 100))
