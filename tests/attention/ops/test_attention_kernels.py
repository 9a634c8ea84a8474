"""The kernels against the reference on tiny shapes; interpreted where there is no GPU."""

import pytest
import torch

from octavo.attention.ops.paged_kv import PagedKV
from tests.attention.ops.batches import (
    DEVICE,
    LAYER_INDEX,
    assert_kernels_equal_reference,
    make_batch,
    make_layer,
    run_kernels,
    run_reference,
)

DECODES = [(1, 1), (1, 16), (1, 17), (1, 64), (1, 65), (1, 131)]
CHUNKS = [(2, 2), (17, 17), (3, 64), (33, 97)]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("num_programs", [1, 4, 64])
def test_decoding_rows_of_any_length_equal_the_reference(num_programs):
    batch = make_batch(make_layer(), DECODES)
    assert_kernels_equal_reference(batch, num_programs=num_programs)


def test_chunks_of_any_length_equal_the_reference():
    assert_kernels_equal_reference(make_batch(make_layer(kv_heads=1), CHUNKS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixed_step_with_padding_equals_the_reference(dtype):
    rows = [(1, 5), (18, 20), (1, 70), (3, 31), (1, 1)]
    batch = make_batch(
        make_layer(norm=True), rows, dtype=dtype, num_padding_rows=2, num_padding_tokens=3
    )
    assert_kernels_equal_reference(batch)


@pytest.mark.parametrize("group", [1, 3, 7])
def test_any_group_of_query_heads_equals_the_reference(group):
    batch = make_batch(make_layer(kv_heads=1, group=group, head_dim=16), [(1, 70), (10, 30)])
    assert_kernels_equal_reference(batch)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_any_head_size_equals_the_reference(head_dim):
    batch = make_batch(make_layer(kv_heads=1, head_dim=head_dim), [(1, 70), (9, 40)])
    assert_kernels_equal_reference(batch)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_a_sliding_window_equals_the_reference(window):
    layer = make_layer(kv_heads=1, sliding_window=window)
    batch = make_batch(layer, [(1, 131), (1, 3), (18, 150), (2, 129)])
    assert_kernels_equal_reference(batch)


@pytest.mark.parametrize("block_size", [1, 128])
def test_any_block_size_equals_the_reference(block_size):
    batch = make_batch(make_layer(kv_heads=1), [(1, 70), (9, 67)], block_size=block_size)
    assert_kernels_equal_reference(batch)


def test_heads_before_tokens_inside_a_block_is_a_matter_of_strides():
    batch = make_batch(make_layer(), [(1, 70), (5, 67)])
    pool = batch.pool.transpose(3, 4).contiguous().transpose(3, 4)
    cache = PagedKV(pool[:, LAYER_INDEX, 0], pool[:, LAYER_INDEX, 1])
    expected = run_kernels(batch)
    assert torch.equal(run_kernels(batch, cache=cache), expected)


@pytest.mark.parametrize(("rotary_dim", "norm"), [(16, False), (64, True)])
def test_stored_k_and_v_equal_the_reference_and_nothing_else_changes(rotary_dim, norm):
    layer = make_layer(kv_heads=3, rotary_dim=rotary_dim, norm=norm)
    batch = make_batch(layer, [(1, 1), (18, 33)], num_padding_rows=1, num_padding_tokens=1)
    _, expected = run_reference(batch)
    run_kernels(batch)
    torch.testing.assert_close(batch.pool, expected, equal_nan=True)


def test_a_row_that_another_row_of_the_step_writes_is_read_complete():
    batch = make_batch(make_layer(), [(16, 16), (1, 17)])
    batch.inputs.block_tables[1, 0] = batch.inputs.block_tables[0, 0]
    assert_kernels_equal_reference(batch)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 96)])
def test_kv_in_8_bits_is_read_as_the_reference_reads_it(dtype, head_dim, rounding_interpreter):
    rows = [(1, 5), (18, 20), (1, 131), (3, 31), (1, 1)]
    layer = make_layer(kv_heads=1, head_dim=head_dim, norm=True)
    batch = make_batch(layer, rows, dtype=dtype, kv_dtype=FP8, num_padding_rows=1)
    assert_kernels_equal_reference(batch)


def test_k_and_v_are_rounded_to_8_bits_once_and_cut_to_the_largest(rounding_interpreter):
    layer = make_layer(kv_heads=3, rotary_dim=16)
    batch = make_batch(layer, [(1, 1), (18, 33)], kv_dtype=FP8, num_padding_tokens=1)
    batch.qkv.mul_(torch.logspace(-4, 4, batch.qkv.shape[1], device=DEVICE))
    _, expected = run_reference(batch)
    run_kernels(batch)
    found, expected = batch.pool.float(), expected.float()
    assert expected[expected.isfinite()].abs().max() == 448
    assert torch.equal(found.isnan(), expected.isnan())
    # A value between two of the type may be rounded to either.
    torch.testing.assert_close(found, expected, rtol=2**-3, atol=2**-9, equal_nan=True)
    is_off = (found != expected) & ~expected.isnan()
    assert is_off.sum() <= 1e-3 * expected.isfinite().sum()
