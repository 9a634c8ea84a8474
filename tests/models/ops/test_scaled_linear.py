"""Products with 8-bit weights against torch in float64."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from octavo.models.ops import linear_converted
from octavo.models.ops import scaled_linear as module
from octavo.models.ops.eight_bits import FP8, INT8, dequantize_rows, quantize_rows
from octavo.models.ops.gemv import gemv
from octavo.models.ops.linear_converted import Tile, multiply_converted
from octavo.models.ops.quantize import quantize
from octavo.models.ops.scaled_linear import scaled_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}


def make_operands(num_rows, shape=(48, 64), dtype=torch.float32, *, rounded_to=FP8):
    """Random operands whose products have a spread of 1."""
    num_outputs, num_inputs = shape
    x = torch.randn(num_rows, num_inputs, device=DEVICE) * num_inputs**-0.5
    weight, scale = quantize_rows(torch.randn(shape, device=DEVICE), rounded_to)
    return x.to(dtype), weight, scale, torch.randn(num_outputs, device=DEVICE).to(dtype)


def assert_product(found, x, weight, scale, bias=0.0):
    expected = functional.linear(x.double(), dequantize_rows(weight, scale, torch.float64)) + bias
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rounded_to", [FP8, INT8])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_the_product_is_that_of_the_dequantised_weight(num_rows, rounded_to, dtype, monkeypatch):
    monkeypatch.setattr(module, "can_multiply_scaled", lambda x, weight: False)
    x, weight, scale, bias = make_operands(num_rows, dtype=dtype, rounded_to=rounded_to)
    for some in (None, bias):
        found = scaled_linear(x, weight, scale, some)
        assert found.dtype == dtype
        assert_product(found, x, weight, scale, 0.0 if some is None else some)


@pytest.mark.parametrize("rounded_to", [FP8, INT8])
@pytest.mark.parametrize("shape", [(5, 40), (3, 576), (7, 1000), (3, 2048), (2, 4096)])
def test_one_row_is_multiplied_as_it_is_stored(shape, rounded_to):
    x, weight, scale, bias = make_operands(1, shape, rounded_to=rounded_to)
    assert_product(gemv(x, weight, bias, scale=scale).out, x, weight, scale, bias)


def test_every_integer_is_multiplied_exactly():
    weight = torch.arange(-128, 128, device=DEVICE).to(INT8)[:, None]
    assert gemv(torch.ones(1, 1, device=DEVICE), weight).out.tolist() == [[*range(-128, 128)]]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 20])
def test_integers_are_read_once_for_as_many_rows_as_the_kernel_takes(num_rows, monkeypatch):
    monkeypatch.setattr(linear_converted, "TILES", {4: Tile(16, 32), 8: Tile(32, 64)})
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for shape in [(48, 64), (7, 33)]:
        x, weight, scale, bias = make_operands(num_rows, shape, dtype, rounded_to=INT8)
        assert_product(multiply_converted(x, weight, scale, bias), x, weight, scale, bias)
        assert_product(multiply_converted(x, weight, scale, None), x, weight, scale)


def test_integers_and_their_rows_may_be_apart(monkeypatch):
    monkeypatch.setattr(linear_converted, "TILES", {8: Tile(16, 32)})
    x, weight, scale, bias = make_operands(5, (20, 200), rounded_to=INT8)
    x, weight = x[:, 16:80], weight[:, 32:96]
    assert_product(multiply_converted(x, weight, scale, bias), x, weight, scale, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 32, 33, 64, 100, 128, 256, 300])
@pytest.mark.parametrize("shape", [(1000, 4096), (40_000, 1024), (3, 12_288)])
def test_integers_are_multiplied_as_they_are(num_rows, shape):
    x, weight, scale, bias = make_operands(num_rows, shape, torch.bfloat16, rounded_to=INT8)
    first = scaled_linear(x, weight, scale, bias)
    assert_product(first, x, weight, scale, bias)
    for _ in range(20):
        assert torch.equal(scaled_linear(x, weight, scale, bias), first)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 100, 1000])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (4096, 12288)])
def test_many_rows_are_multiplied_as_they_are_quantised(num_rows, shape):
    x, weight, scale, bias = make_operands(num_rows, shape, torch.bfloat16)
    rounded = dequantize_rows(*quantize_rows(x), torch.float32)
    # The matrix units keep about 14 bits of a sum.
    plain = dequantize_rows(weight, scale, torch.float32)
    expected = functional.linear(rounded, plain, bias.float())
    error = scaled_linear(x, weight, scale, bias).float() - expected
    assert error.norm() < 2**-8 * expected.norm()


@pytest.fixture
def fast_product(monkeypatch):
    """Let a function stand in for torch's 8-bit product, and let it be chosen."""

    def install(product):
        monkeypatch.setattr(torch, "_scaled_mm", product)
        monkeypatch.setattr(module, "can_multiply_scaled", lambda x, weight: True)

    return install


def fail(error):
    def product(*args, **kwargs):
        raise error

    return product


def test_a_product_that_cublas_lacks_is_dequantised_and_said_once(
    fast_product, caplog, rounding_interpreter
):
    fast_product(fail(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling")))
    x, weight, scale, bias = make_operands(3)
    for _ in range(2):
        assert_product(scaled_linear(x, weight, scale, bias), x, weight, scale, bias)
    assert caplog.messages == [
        "cuBLAS has no 8-bit product of 3 rows with a weight of 48 x 64: it is dequantised"
    ]


def test_other_errors_of_the_product_are_raised(fast_product, rounding_interpreter):
    fast_product(fail(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        scaled_linear(*make_operands(3))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 64), (2, 576), (1, 3000)])
def test_the_kernel_quantises_as_torch_does(shape, dtype, rounding_interpreter):
    wide = torch.randn(shape[0], shape[1] + 16, device=DEVICE).to(dtype)
    x = wide[:, 16:]
    x[0] *= len(x) == 1  # a row of zeros
    values, scale = quantize(x)
    expected_values, expected_scale = quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale)
    # A quotient between two values of the type may be rounded to either.
    torch.testing.assert_close(values.float(), expected_values.float(), rtol=2**-3, atol=2**-9)
    assert (values.float() != expected_values.float()).float().mean() < 4e-3


QUANTISERS = [
    (quantize_rows, torch.nan),
    (quantize_rows, torch.inf),
    (partial(quantize_rows, dtype=INT8), torch.nan),
    (partial(quantize_rows, dtype=INT8), torch.inf),
    (quantize, torch.nan),
    pytest.param(quantize, -torch.inf, marks=pytest.mark.gpu),  # the interpreter warns
]


@pytest.mark.parametrize(("quantiser", "bad"), QUANTISERS)
def test_what_is_not_finite_stays_so_in_its_own_row(quantiser, bad):
    x = torch.ones(3, 64, device=DEVICE)
    x[1, 7] = bad
    found = dequantize_rows(*quantiser(x), torch.float32)
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not found[1, 7].isfinite()


def test_every_value_of_the_type_is_quantised_to_itself():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).float()
    row = codes[codes.isfinite()][None]
    values, scale = quantize_rows(row)
    assert scale.tolist() == [1.0]
    assert torch.equal(values.float(), row)


def test_elements_are_off_by_the_stated_bounds():
    rows = torch.randn(64, 256, device=DEVICE) * torch.logspace(-6, 6, 64, device=DEVICE)[:, None]
    values, scale = quantize_rows(rows)
    error = (dequantize_rows(values, scale, torch.float32) - rows).abs()
    bound = torch.maximum(rows.abs() * 2**-4, scale[:, None] * 2**-10)
    assert (error <= bound * (1 + 1e-5)).all()
    values, scale = quantize_rows(rows, INT8)
    error = (dequantize_rows(values, scale, torch.float32) - rows).abs()
    assert (error <= scale[:, None] / 2 * (1 + 1e-4)).all()


def test_every_finite_value_is_dequantised_exactly():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    codes = codes[codes.float().isfinite()].repeat(3, 1)
    scale = torch.tensor([1.0, 2.0**-100, 3.0**20], device=DEVICE)
    found = dequantize_rows(codes, scale, torch.float64)
    assert torch.equal(found, (codes.float() * scale[:, None]).double())
