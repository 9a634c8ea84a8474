"""The product with 2 to 128 rows, and what is folded into it, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from octavo.models.ops.hopper_tiles import Tile
from octavo.models.ops.linear_hopper import can_multiply_on_hopper, multiply_on_hopper
from octavo.models.ops.norm import Norm, Normed
from tests.models.ops import operands
from tests.models.ops.operands import MODEL_SHAPES, product

EPS = 1e-5
TOLERANCE = 2**-7
TILES = [
    Tile(num_consumers=1, num_parts=1),
    Tile(num_consumers=3, num_parts=1),
    Tile(num_consumers=2, num_parts=4),
    Tile(num_consumers=1, num_parts=8),
    Tile(num_consumers=1, num_parts=2, num_neighbours=2),
]


def draw(*shape):
    return operands.draw(*shape, dtype=torch.bfloat16)


def make_operands(num_rows, num_features, num_inputs):
    """Return x and a weight; skips where the kernel does not run."""
    x, weight, _ = operands.make_operands(num_rows, num_features, num_inputs, torch.bfloat16)
    if not can_multiply_on_hopper(x, weight):
        pytest.skip("not the device that the kernel is for")
    return x, weight


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 8, 17, 33, 64, 128])
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_the_product_equals_torch_at_the_shapes_of_models(shape, num_rows):
    x, weight = make_operands(num_rows, *shape)
    bias = draw(shape[0])
    assert_close(multiply_on_hopper(x, weight, bias).out, product(x, weight) + bias.double())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 20, 34, 100])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("outputs", "inputs"), [(320, 512), (200, 328), (1000, 1000)])
def test_everything_folded_equals_torch(outputs, inputs, tile, num_rows):
    """A product with sum and norm, and the gated one behind it: a whole feed-forward's end."""
    x, weight = make_operands(num_rows, outputs, inputs)
    residual, norm = draw(num_rows, outputs), Norm(draw(outputs), EPS)
    made = multiply_on_hopper(x, weight, residual=residual, norm=norm, tile=tile)
    assert_close(made.out, product(x, weight) + residual.double())
    assert_close(made.values, made.out.double() * norm.weight.double())
    squares = made.out.double().square().sum(dim=1)
    torch.testing.assert_close(made.square_sums.sum(dim=0).double(), squares, rtol=1e-6, atol=0)
    gate_up, bias = draw(2 * inputs, outputs) * outputs**-0.5, draw(2 * inputs)
    normed = Normed(made.values, made.out, made.square_sums, norm)
    gated = multiply_on_hopper(normed, gate_up, bias, is_gated=True, tile=tile)
    stream = made.values.double()
    factor = (made.out.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    gate, up = (product(stream, gate_up) * factor + bias.double()).chunk(2, dim=-1)
    expected = functional.silu(gate) * up
    torch.testing.assert_close(gated.out.double(), expected, rtol=2**-6, atol=2**-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_a_row_is_the_same_in_any_company(tile):
    x, weight = make_operands(64, 320, 1024)
    whole = multiply_on_hopper(x, weight, tile=tile).out
    for rows in (slice(0, 33), slice(5, 40), slice(31, 64), slice(7, 9), slice(20, 50)):
        assert torch.equal(multiply_on_hopper(x[rows], weight, tile=tile).out, whole[rows])


@pytest.mark.gpu
def test_products_meet_again_and_again():
    x, weight = make_operands(48, 1024, 3072)
    first = multiply_on_hopper(x, weight, tile=TILES[2]).out
    for tile in [*TILES, *TILES] * 20:
        multiply_on_hopper(x, weight, tile=tile)
    assert torch.equal(multiply_on_hopper(x, weight, tile=TILES[2]).out, first)


@pytest.mark.gpu
def test_rows_may_be_apart():
    x, weight = make_operands(40, 128, 512)
    x = x[:, 64:320]
    assert_close(multiply_on_hopper(x, weight[:, 64:320]).out, product(x, weight[:, 64:320]))
