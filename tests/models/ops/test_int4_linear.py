"""Products with weights of four bits on a CPU."""

import pytest
import torch
from torch.nn import functional

from octavo.models.ops import int4_linear
from octavo.models.ops.int4_linear import (
    GROUP_SIZE,
    MAX_ROWS,
    TILE_WIDTH,
    Int4Weight,
    can_quantize,
    fits,
    pack_tiles,
    quantize_groups,
    round_to_int4,
)
from octavo.models.ops.linear import can_pack

pytestmark = pytest.mark.skipif(not can_quantize(), reason="this CPU has no AVX2")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_q4_1(out_features, in_features):
    """Return a weight as a file has it: 16 levels in each group, the first and the last used."""
    shape = (out_features, in_features // GROUP_SIZE, GROUP_SIZE)
    levels = torch.randint(0, 16, shape)
    levels[..., 0], levels[..., 1] = 0, 15
    scales, offsets = torch.rand(shape[:2]).half() * 0.01, -torch.rand(shape[:2]).half() * 0.1
    return (levels * scales[..., None].float() + offsets[..., None].float()).flatten(1)


def pack(weight):
    return Int4Weight(round_to_int4(weight))


def test_what_was_stored_in_four_bits_comes_back():
    weight = make_q4_1(48, 96)
    values, scales, offsets = quantize_groups(weight)
    assert (values.min(), values.max()) == (0, 15)
    back = values * scales[..., None] + offsets[..., None]
    torch.testing.assert_close(back.flatten(1), weight, atol=1e-7, rtol=1e-6)


def test_groups_of_one_value_are_that_value():
    values, scales, offsets = quantize_groups(torch.full((16, 64), -0.5))
    assert (values.unique().tolist(), scales.unique().tolist()) == ([0], [0])
    assert offsets.unique().tolist() == [-0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, MAX_ROWS, MAX_ROWS + 1, 64])
def test_few_and_many_rows_give_the_same_up_to_rounding(num_rows, dtype):
    weight, x = make_q4_1(48, 96), torch.randn(num_rows, 96, dtype=dtype)
    bias = torch.randn(48, dtype=dtype)
    packed = pack(weight)
    for some in (None, bias):
        y = packed.linear(x, some)
        expected = functional.linear(x.float(), weight, None if some is None else some.float())
        assert num_rows > MAX_ROWS or y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("is_native", [False, True])
def test_many_rows_multiply_with_the_same_values_on_any_cpu(is_native, monkeypatch):
    if is_native and not can_pack(torch.empty(0, dtype=torch.bfloat16)):
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr(int4_linear, "multiplies_bfloat16", lambda: is_native)
    parts, x = round_to_int4(torch.randn(48, 96)), torch.randn(64, 96)
    y = Int4Weight(parts).linear(x)
    expected = functional.linear(x.to(y.dtype).double(), parts["rounded"].double())
    assert y.dtype == (torch.bfloat16 if is_native else torch.float32)
    torch.testing.assert_close(y.double(), expected, atol=1e-2 if is_native else 1e-4, rtol=1e-2)


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1])
def test_rows_may_be_apart(num_rows):
    packed, x = pack(make_q4_1(48, 96)), torch.randn(num_rows, 192).bfloat16()[:, :96]
    assert torch.equal(packed.linear(x), packed.linear(x.clone()))


@pytest.mark.parametrize("num_rows", [MAX_ROWS, MAX_ROWS + 1])
def test_a_row_that_is_not_finite_shows_and_spares_the_others(num_rows):
    packed, x = pack(make_q4_1(48, 96)), torch.randn(num_rows, 96)
    expected = packed.linear(x)
    x[1, 5] = torch.nan
    y = packed.linear(x)
    assert y[1].isnan().all()
    assert torch.equal(y[2:], expected[2:])


def test_tiles_have_sixteen_outputs_in_low_bits_and_sixteen_in_high_ones():
    values = torch.randint(0, 16, (2 * TILE_WIDTH, 96)).byte()
    tiles = pack_tiles(values).view(2, 96, TILE_WIDTH // 2)
    for tile, weight in zip(tiles, values.split(TILE_WIDTH), strict=True):
        assert torch.equal(torch.cat((tile & 15, tile >> 4), dim=1), weight.T)


@pytest.mark.parametrize("has_units", [False, True])
def test_tiles_are_made_where_the_cpu_reads_them_and_the_weight_fits(has_units, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_units)
    assert pack(torch.randn(TILE_WIDTH, 64)).has_tiles == has_units
    assert not pack(torch.randn(TILE_WIDTH + 16, 64)).has_tiles


def test_shapes_that_do_not_fit_are_known():
    assert fits(48, 96)
    assert not fits(40, 96)
    assert not fits(48, 80)
