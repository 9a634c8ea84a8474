"""Rows with common leading blocks: what the plan makes of them, and what attention does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.backend import AttentionInputs
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.plan_decode import plan_decode
from tests.attention.ops.batches import (
    DEVICE,
    assert_kernels_equal_reference,
    make_batch,
    make_layer,
    share_blocks,
)

BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def plan(tables, lengths, *, layer=None, num_programs=1, tokens=None, head_dim=64):
    """Plan rows of these block tables, in float32: tiles of 32 tokens, two blocks."""
    layer = layer or make_layer(head_dim=head_dim)
    workspace = DecodeWorkspace.create(
        layer.head_dim, torch.float32, num_programs=num_programs, device=DEVICE
    )
    tokens = tokens or [1] * len(lengths)
    width = max(map(len, tables))
    padded = [[*table, *[2**30] * (width - len(table))] for table in tables]
    inputs = AttentionInputs(
        torch.tensor([0, *tokens]).cumsum(0).int().to(DEVICE),
        torch.tensor(lengths).int().to(DEVICE),
        torch.tensor(padded).int().to(DEVICE),
        torch.empty(sum(tokens)),
        torch.empty(sum(tokens)),
    )
    return plan_decode(layer, inputs, workspace=workspace, block_size=BLOCK_SIZE)


def read_prefixes(found):
    """Return for each prefix of a plan its tiles, leader and readers."""
    if not found.has_prefixes:
        return []
    at_once = found.workspace.prefix_queries // 2
    end, prefixes, unit = int(found.shares[1, :, 8].max()), [], 0
    for start, tiles, leader, place, count, pitch, *_ in found.lines[1].tolist():
        if unit == end:
            break
        assert start == unit
        readers = [row for row, _ in found.readers.tolist()[place : place + count]]
        starts = range(0, count, at_once)
        prefixes += [(tiles, leader, readers[first : first + at_once]) for first in starts]
        unit += pitch * 2 * -(-count // at_once)
    assert unit == end
    return prefixes


def find_groups(tables, lengths, **more):
    """Return tiles and readers of all prefixes."""
    prefixes = read_prefixes(plan(tables, lengths, **more))
    return sorted((tiles, readers) for tiles, _, readers in prefixes)


def make_table(common, num_own, *, first=1000):
    return [*common, *range(first, first + num_own)]


def test_rows_with_common_leading_blocks_are_read_together_in_any_order():
    ones, twos = range(10), range(100, 106)
    tables = [
        make_table(common, 2, first=1000 + 50 * row)
        for row, common in enumerate([ones, twos, ones, ones, [], twos])
    ]
    lengths = [len(table) * BLOCK_SIZE for table in tables]
    assert find_groups(tables, lengths) == [(3, [1, 5]), (5, [0, 2, 3])]


def test_a_block_that_all_rows_begin_with_does_not_hide_longer_prefixes():
    system = [7, 8]
    tables = [
        make_table([*system, *range(100 * (row % 2), 100 * (row % 2) + 12)], 1, first=1000 + row)
        for row in range(8)
    ]
    lengths = [len(table) * BLOCK_SIZE for table in tables]
    assert find_groups(tables, lengths) == [(7, [0, 2, 4, 6]), (7, [1, 3, 5, 7])]


def test_the_last_token_of_a_row_is_never_in_a_prefix():
    tables = [list(range(8)), list(range(8)), list(range(8))]
    assert find_groups(tables, [128, 128, 128]) == [(3, [0, 1, 2])]
    assert find_groups(tables, [128, 128, 97]) == [(3, [0, 1, 2])]
    assert find_groups(tables, [128, 128, 96]) == [(2, [0, 1, 2])]


def test_large_families_are_cut_into_prefixes_of_so_many_rows_as_fit():
    tables = [make_table(range(4), 1, first=100 + row) for row in range(70)]
    groups = find_groups(tables, [70] * 70)
    assert [len(readers) for _, readers in groups] == [32, 32, 6]
    assert sorted(row for _, readers in groups for row in readers) == list(range(70))


def test_rows_that_prefill_or_see_a_window_or_are_padding_share_nothing():
    tables = [make_table(range(8), 1, first=100 + row) for row in range(4)]
    lengths = [130, 130, 130, 130]
    assert find_groups(tables, lengths, tokens=[1, 2, 2, 1]) == [(4, [0, 3])]
    assert find_groups(tables, [130, 0, 0, 0]) == []
    windowed = make_layer(sliding_window=130)
    assert find_groups(tables, [130, 131, 130, 131], layer=windowed) == [(4, [0, 2])]


def test_prefixes_that_save_too_little_are_not_worth_a_second_walk():
    tables = [make_table(range(8), 1, first=100 + row) for row in range(2)]
    assert find_groups(tables, [130, 130], num_programs=1) == [(4, [0, 1])]
    assert find_groups(tables, [130, 130], num_programs=2) == []


@st.composite
def trees(draw):
    """Make tables of rows that grow out of each other at random blocks, and lengths to match."""
    tables = [list(range(draw(st.integers(1, 40))))]
    for row in range(1, draw(st.integers(1, 40))):
        parent = draw(st.sampled_from(tables))
        kept = draw(st.integers(0, len(parent)))
        own = draw(st.integers(1, 4))
        tables.append(make_table(parent[:kept], own, first=1000 * row))
    lengths = [draw(st.integers(1, len(table) * BLOCK_SIZE)) for table in tables]
    return tables, lengths


@settings(max_examples=15, deadline=None)
@given(trees(), st.integers(1, 9))
def test_every_row_reads_each_of_its_tiles_once(tree, num_programs):
    tables, lengths = tree
    found = plan(tables, lengths, num_programs=num_programs)
    left = [-(-length // 32) for length in lengths]
    readers_seen = set()
    for tiles, leader, readers in read_prefixes(found):
        assert len(readers) == len(readers_seen | set(readers)) - len(readers_seen)
        readers_seen |= set(readers)
        for row in readers:
            assert tables[row][: 2 * tiles] == tables[leader][: 2 * tiles]
            left[row] -= tiles
    assert [record[1] for record in found.lines[0].tolist()] == left
    assert min(left) > 0


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (8, 256)])
def test_attention_over_common_blocks_equals_the_reference(group, head_dim):
    layer = make_layer(kv_heads=1, group=group, head_dim=head_dim)
    rows = [(1, 90), (1, 100), (3, 90), (1, 81), (1, 131), (1, 170), (1, 165), (1, 5)]
    batch = make_batch(layer, rows, num_padding_rows=2)
    share_blocks(batch, [0, 1, 3], 5)
    share_blocks(batch, [4, 5, 6], 6)
    assert_kernels_equal_reference(batch, num_programs=1, num_families=2)


@pytest.mark.parametrize("num_programs", [1, 8])
def test_prefixes_cut_anywhere_equal_the_reference(num_programs):
    layer = make_layer(kv_heads=1, group=8)
    batch = make_batch(layer, [(1, 260 + row) for row in range(10)])
    share_blocks(batch, list(range(10)), 16)
    assert_kernels_equal_reference(batch, num_programs=num_programs, num_families=1)


@pytest.mark.parametrize("block_size", [1, 64])
def test_prefixes_of_any_block_size_equal_the_reference(block_size):
    batch = make_batch(make_layer(kv_heads=1), [(1, 150)] * 4, block_size=block_size)
    share_blocks(batch, list(range(4)), 128 // block_size)
    assert_kernels_equal_reference(batch, num_programs=1, num_families=1)
