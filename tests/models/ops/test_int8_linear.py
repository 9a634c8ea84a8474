"""Products of 8-bit integers on a CPU."""

import pytest
import torch
from torch.nn import functional

from octavo.models.ops.int8_linear import (
    MAX_STREAMED_ROWS,
    Int8Weight,
    can_quantize,
    make_rotation,
    quantize_rows,
    round_to_int8,
)

pytestmark = pytest.mark.skipif(not can_quantize(), reason="this CPU has no AVX512-VNNI")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pack(weight, rotates_inputs=False):
    parts = round_to_int8(weight, rotates_inputs=rotates_inputs)
    return Int8Weight(parts, rotates_inputs=rotates_inputs)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 17, 64])
def test_it_is_the_product_of_the_rounded_operands(num_rows):
    x, weight, bias = torch.randn(num_rows, 96), torch.randn(40, 96), torch.randn(40)
    rounded = [values * scales for values, scales in (quantize_rows(x), quantize_rows(weight))]
    for some in (None, bias):
        torch.testing.assert_close(pack(weight).linear(x, some), functional.linear(*rounded, some))


def test_rounding_is_off_by_half_a_step_at_most():
    x = torch.randn(5, 96) * torch.tensor([1e-6, 1, 3, 1e6, 0])[:, None]
    values, scales = quantize_rows(x)
    assert values.abs().amax(dim=1).tolist() == [127, 127, 127, 127, 0]
    assert ((values * scales - x).abs() <= scales * 0.5001).all()


@pytest.mark.parametrize("rotates_inputs", [False, True])
def test_a_row_does_not_depend_on_its_company(rotates_inputs):
    weight = pack(torch.randn(64, 192), rotates_inputs)
    x = torch.randn(40, 192) * torch.logspace(-3, 3, 40)[:, None]
    together = weight.linear(x)
    alone = torch.cat([weight.linear(row[None]) for row in x])
    if rotates_inputs:  # a float32 product is in front
        assert ((alone - together).norm(dim=1) < 1e-2 * together.norm(dim=1)).all()
    else:
        assert torch.equal(alone, together)


def test_rotated_inputs_lose_less_where_one_stands_out():
    x, weight = torch.randn(8, 192), torch.randn(64, 192)
    x[:, 7] *= 300
    weight[:, 7] = 0  # what matters is in the others
    exact = functional.linear(x, weight)
    errors = [(pack(weight, rotates).linear(x) - exact).norm() for rotates in (False, True)]
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("num_rows", [0, 1, 3, MAX_STREAMED_ROWS, MAX_STREAMED_ROWS + 1])
def test_a_large_weight_gives_the_same_bits(num_rows):
    parts, x = round_to_int8(torch.randn(64, 192)), torch.randn(num_rows, 192)
    assert torch.equal(Int8Weight(parts, is_large=True).linear(x), Int8Weight(parts).linear(x))


@pytest.mark.parametrize("size", [1, 3, 64, 576])
def test_a_rotation_keeps_lengths_and_has_no_large_entries(size):
    rotation = make_rotation(size)
    torch.testing.assert_close(rotation.T @ rotation, torch.eye(size), atol=1e-5, rtol=0)
    assert rotation.abs().max() <= (2 / size) ** 0.5 * 1.001 or size == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rotates_inputs", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_row_that_is_not_finite_shows_and_spares_the_others(value, rotates_inputs, is_large):
    parts = round_to_int8(torch.randn(64, 192), rotates_inputs=rotates_inputs)
    weight = Int8Weight(parts, rotates_inputs=rotates_inputs, is_large=is_large)
    x = torch.randn(3, 192)
    expected = weight.linear(x)
    x[1, 5] = value
    y = weight.linear(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
