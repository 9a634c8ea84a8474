"""The compiled kernels over rows with common leading blocks, against the reference."""

import random

import pytest
import torch

from tests.attention.ops.batches import (
    assert_kernels_equal_reference,
    make_batch,
    make_layer,
    share_blocks,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 64, torch.bfloat16),
        (2, 128, torch.bfloat16),
        (3, 96, torch.bfloat16),
        (4, 128, torch.bfloat16),
        (7, 64, torch.bfloat16),
        (8, 128, torch.bfloat16),
        (4, 256, torch.bfloat16),
        (4, 128, torch.float16),
    ],
)
def test_rows_that_grow_out_of_each_other_equal_the_reference(group, head_dim, dtype):
    layer = make_layer(group=group, head_dim=head_dim, max_position=4096, norm=True)
    batch = make_tree(layer, seed=group * head_dim, dtype=dtype)
    assert_kernels_equal_reference(batch, num_programs=30)


@pytest.mark.parametrize(("block_size", "window"), [(1, None), (32, None), (256, None), (16, 700)])
def test_common_blocks_of_any_size_equal_the_reference(block_size, window):
    layer = make_layer(group=4, head_dim=128, max_position=4096, sliding_window=window)
    batch = make_tree(layer, seed=block_size, dtype=torch.bfloat16, block_size=block_size)
    assert_kernels_equal_reference(batch, num_programs=30)


def test_common_blocks_of_8_bits_equal_the_reference():
    layer = make_layer(group=4, head_dim=128, max_position=4096)
    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}
    assert_kernels_equal_reference(make_tree(layer, seed=5, **dtypes), num_programs=15)


@pytest.mark.parametrize("num_programs", [1, 100, 528])
def test_one_family_of_many_rows_equals_the_reference(num_programs):
    layer = make_layer(kv_heads=2, group=4, head_dim=128, max_position=4096)
    rows = [(1, 2100 + row) for row in range(150)]
    batch = make_batch(layer, rows, dtype=torch.bfloat16)
    share_blocks(batch, list(range(149, -1, -1)), 125)
    assert_kernels_equal_reference(batch, num_programs=num_programs, num_families=1)


def make_tree(layer, *, seed, block_size=16, **dtypes):
    """Make rows of which each begins with some blocks of an earlier one; some prefill."""
    draw = random.Random(seed)
    rows = []
    for _ in range(70):
        context = draw.choice([draw.randint(1, 60), draw.randint(1, 1500)])
        rows.append((draw.choice([1, 1, 1, 1, min(context, 5)]), context))
    batch = make_batch(layer, rows, block_size=block_size, num_padding_rows=3, **dtypes)
    for row in range(1, len(rows)):
        other = draw.randrange(max(row - 6, 0), row)
        num_tokens = min(context - count for count, context in (rows[row], rows[other]))
        num_blocks = num_tokens // block_size
        share_blocks(batch, [other, row], draw.choice([num_blocks, draw.randint(0, num_blocks)]))
    return batch
