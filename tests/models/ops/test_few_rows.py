"""The product with a few rows, and what is folded into it, against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from octavo.models.ops.few_rows import (
    MAX_ROWS,
    NUM_MULTIPROCESSORS,
    Tile,
    choose_tile,
    multiply_few_rows,
)
from octavo.models.ops.gemv import gemv
from octavo.models.ops.norm import Norm, Normed
from tests.models.ops.operands import DEVICE, MODEL_SHAPES, draw, make_operands, product

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 wrongly
    TOLERANCE[torch.bfloat16] = 2**-7
EPS = 1e-5
SMALL = Tile(16, 32, 2, 1)
SPLIT = Tile(16, 32, 2, 3)


def multiply(x, weight, bias=None, *, tile=None, **folded):
    """One row goes to one kernel, several to the other: what they fold is the same."""
    if len(x.values if isinstance(x, Normed) else x) == 1:
        return gemv(x, weight, bias, **folded)
    return multiply_few_rows(x, weight, bias, tile=tile, **folded)


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [SMALL, SPLIT])
@pytest.mark.parametrize("shape", [(2, 48, 96), (5, 40, 100), (17, 7, 33)])
def test_the_product_equals_torch(shape, tile, dtype):
    x, weight, bias = make_operands(*shape, dtype)
    assert_close(multiply_few_rows(x, weight, tile=tile).out, product(x, weight))
    assert_close(multiply_few_rows(x, weight, bias, tile=tile).out, product(x, weight, bias))


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 3)])
def test_everything_folded_equals_torch(rows, parts):
    check_folding(rows, 24, 40, parts)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 150),
    parts=st.integers(1, 4),
)
def test_everything_folded_equals_torch_whatever_the_sizes(rows, outputs, inputs, parts):
    check_folding(rows, outputs, inputs, parts)


def check_folding(rows, outputs, inputs, parts):
    """A product with sum and norm, and the gated one behind it: a whole feed-forward's end."""
    tile = Tile(16, 32, 2, parts)
    x, weight, bias = make_operands(rows, outputs, inputs)
    residual, norm = draw(rows, outputs), Norm(draw(outputs), EPS)
    made = multiply(x, weight, bias, residual=residual, norm=norm, tile=tile)
    stream = product(x, weight, bias) + residual
    assert_close(made.out, stream)
    assert_close(made.values, stream * norm.weight.double())
    normed = Normed(made.values, made.out, made.square_sums, norm)
    gate_up, gate_up_bias = draw(2 * inputs, outputs), draw(2 * inputs)
    gated = multiply(normed, gate_up, gate_up_bias, is_gated=True, tile=tile)
    expected = stream * (stream.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.weight
    gate, up = product(expected, gate_up, gate_up_bias).chunk(2, dim=-1)
    torch.testing.assert_close(gated.out.double(), functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_stream_is_rounded_and_then_normalised(dtype, rows):
    x, weight, _ = make_operands(rows, 32, 64, dtype)
    residual, norm = draw(rows, 32, dtype=dtype), Norm(draw(32, dtype=dtype), EPS)
    made = multiply(x, weight, residual=residual, norm=norm, tile=SPLIT)
    assert_close(made.values, made.out.double() * norm.weight.double())
    if rows > 1:
        squares = made.out.double().square().sum(dim=1)
        found = made.square_sums.sum(dim=0).double()
        torch.testing.assert_close(found, squares, rtol=1e-6, atol=0)


def test_a_row_is_the_same_in_any_company():
    x, weight, _ = make_operands(MAX_ROWS, 24, 70)
    if DEVICE == "cpu":  # the interpreter adds in an order of its own, small integers without error
        x, weight = (64 * x).round(), weight.round()
    whole = multiply_few_rows(x, weight, tile=SPLIT).out
    for rows in (slice(0, 2), slice(5, 14), slice(20, 32)):
        assert torch.equal(multiply_few_rows(x[rows], weight, tile=SPLIT).out, whole[rows])


def test_rows_may_be_apart():
    x, wide, _ = make_operands(6, 20, 200)
    x, weight = x[:, 16:80], wide[:, 32:96]
    assert_close(multiply_few_rows(x, weight, tile=SPLIT).out, product(x, weight))


def test_counters_are_zero_again_after_each_product():
    x, weight, _ = make_operands(3, 40, 100)
    first = multiply_few_rows(x, weight, tile=SPLIT).out
    assert torch.equal(multiply_few_rows(x, weight, tile=SPLIT).out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 8, 16, 17, 32])
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_the_product_equals_torch_at_the_shapes_of_models(shape, num_rows):
    x, weight, bias = make_operands(num_rows, *shape, torch.bfloat16)
    assert_close(multiply_few_rows(x, weight, bias).out, product(x, weight, bias))


def test_every_multiprocessor_has_a_program_and_every_part_has_inputs():
    for num_features, num_inputs in [
        *MODEL_SHAPES,
        (960, 576),
        (64 * 33, 128 * 5),
        (8, 8),
        (151_936, 1024),
    ]:
        tile = choose_tile(num_features, num_inputs)
        num_programs = -(-num_features // tile.features) * tile.num_parts
        assert tile.num_parts == 1 or num_programs <= NUM_MULTIPROCESSORS
        num_steps = -(-num_inputs // tile.columns)
        assert (tile.num_parts - 1) * -(-num_steps // tile.num_parts) < num_steps
