"""The product with one row against torch in float64, whatever the shape and the type."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from octavo.models.ops.gemv import choose_tile
from octavo.models.ops.gemv import gemv as gemv_with_folding
from octavo.models.ops.norm import Norm, Normed
from tests.models.ops import operands
from tests.models.ops.operands import DEVICE, draw, product

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10}
if DEVICE == "cuda":  # the interpreter cuts where the device rounds
    TOLERANCE[torch.bfloat16] = 2**-8
EPS = 1e-5
SHAPES = [(1, 1), (5, 40), (3, 576), (64, 128), (7, 1000), (3, 2048), (10, 3080), (2, 4096)]
MODEL_SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (4096, 12288), (151936, 1024)]


def gemv(x, weight, bias=None, *, out=None):
    """The plain product."""
    return gemv_with_folding(x, weight, bias, out=out).out


make_operands = partial(operands.make_operands, 1)


def assert_product(found, x, weight, bias=0.0):
    expected = product(x, weight) + bias
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_equals_torch(shape, dtype):
    x, weight, bias = make_operands(*shape, dtype)
    assert gemv(x, weight).dtype == dtype
    assert_product(gemv(x, weight), x, weight)
    assert_product(gemv(x, weight, bias), x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_the_product_equals_torch_at_the_shapes_of_models(shape, dtype):
    x, weight, bias = make_operands(*shape, dtype)
    assert_product(gemv(x, weight, bias), x, weight, bias)


def test_rows_of_the_weight_may_be_apart():
    x, wide, _ = make_operands(6, 200)
    x, weight = x[:, 16:80], wide[:, 32:96]
    assert_product(gemv(x, weight), x, weight)


def test_nothing_is_written_behind_the_last_output():
    x, weight, _ = make_operands(5, 64)
    guarded = torch.full((1, 64), torch.nan, device=DEVICE)
    gemv(x, weight, out=guarded[:, :5])
    assert_product(guarded[:, :5], x, weight)
    assert guarded[:, 5:].isnan().all()


def test_everything_folded_equals_torch():
    check_folding(24, 40)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(outputs=st.integers(1, 40), inputs=st.integers(1, 150))
def test_everything_folded_equals_torch_whatever_the_sizes(outputs, inputs):
    check_folding(outputs, inputs)


def check_folding(outputs, inputs):
    """A product with sum and norm, and the gated one behind it: a whole feed-forward's end."""
    x, weight, bias = make_operands(outputs, inputs)
    residual, norm = draw(1, outputs), Norm(draw(outputs), EPS)
    made = gemv_with_folding(x, weight, bias, residual=residual, norm=norm)
    stream = product(x, weight, bias) + residual
    torch.testing.assert_close(made.out.double(), stream, rtol=2e-6, atol=2e-6)
    expected = stream * norm.weight.double()
    torch.testing.assert_close(made.values.double(), expected, rtol=2e-6, atol=2e-6)
    normed = Normed(made.values, made.out, None, norm)
    gate_up, gate_up_bias = draw(2 * inputs, outputs), draw(2 * inputs)
    gated = gemv_with_folding(normed, gate_up, gate_up_bias, is_gated=True).out
    expected = stream * (stream.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.weight
    gate, up = product(expected, gate_up, gate_up_bias).chunk(2, dim=-1)
    torch.testing.assert_close(gated.double(), functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_stream_is_rounded_and_then_multiplied_with_the_norm(dtype):
    x, weight, _ = make_operands(32, 64, dtype)
    residual, norm = draw(1, 32, dtype=dtype), Norm(draw(32, dtype=dtype), EPS)
    made = gemv_with_folding(x, weight, residual=residual, norm=norm)
    expected = made.out.double() * norm.weight.double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(made.values.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_a_graph_computes_what_its_inputs_hold_now():
    x, weight, _ = make_operands(256, 512)
    gemv(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemv(x, weight)
    x.copy_(torch.randn_like(x) * 512**-0.5)
    graph.replay()
    assert_product(out, x, weight)
    first = out.clone()
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_thread_holds_few_weights_at_a_time(itemsize, is_gated):
    for num_inputs in (1, 40, 576, 1024, 1536, 2048, 3584, 4096, 5120, 12288, 14336):
        rows, columns, num_warps = choose_tile(num_inputs, itemsize, is_gated=is_gated)
        assert 8 <= rows * columns // (32 * num_warps) <= (128 if itemsize == 1 else 32)
        assert columns < 2 * num_inputs
        assert rows > 1 or not is_gated
