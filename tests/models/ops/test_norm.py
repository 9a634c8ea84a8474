"""The fused kernels against torch in float64, whatever the shape and the type."""

import pytest
import torch

from octavo.models.ops.norm import add_rms_norm, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10}
if DEVICE == "cuda":  # the interpreter cuts where the device rounds
    TOLERANCE[torch.bfloat16] = 2**-8


def make_rows(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def poison(like):
    return torch.full_like(like, torch.nan)


def expect(x, weight):
    x = x.double()
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (2, 3584)])
def test_normalised_rows_equal_torch(shape, dtype):
    x, weight = make_rows(*shape, dtype=dtype), make_rows(shape[1], dtype=dtype)
    out = poison(x)
    assert rms_norm(x, weight, eps=EPS, out=out) is out
    assert_close(out, expect(x, weight))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_sum_is_rounded_and_then_normalised(dtype):
    x, residual, weight = (make_rows(*shape, dtype=dtype) for shape in [(3, 80), (3, 80), (80,)])
    out = poison(x), poison(x)
    normalised, total = add_rms_norm(x, residual, weight, eps=EPS, out=out)
    assert normalised is out[0]
    assert torch.equal(total, x + residual)
    assert_close(normalised, expect(x + residual, weight))


def test_outputs_may_be_the_inputs():
    x, residual, weight = make_rows(3, 80), make_rows(3, 80), make_rows(80)
    expected = add_rms_norm(x, residual, weight, eps=EPS)
    add_rms_norm(x, residual, weight, eps=EPS, out=(x, residual))
    assert torch.equal(x, expected[0])
    assert torch.equal(residual, expected[1])


def test_rows_may_be_slices_of_wider_ones():
    wide, weight = make_rows(4, 200), make_rows(64)
    assert_close(rms_norm(wide[:, 32:96], weight, eps=EPS), expect(wide[:, 32:96], weight))


def test_no_rows_are_no_work():
    assert rms_norm(make_rows(0, 64), make_rows(64), eps=EPS).shape == (0, 64)
