"""Who computes a linear layer's product."""

import pytest
import torch
from torch.nn import functional

from octavo.models.ops import linear as linear_module
from octavo.models.ops.gemv import gemv
from octavo.models.ops.linear import linear


def make_operands(num_rows, *, device, dtype=torch.float32):
    shapes = [(num_rows, 64), (8, 64), (8,)]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.fixture
def gemv_calls(monkeypatch):
    """Shapes of the weights that linear hands to the kernel."""
    calls = []

    def record(x, weight, bias=None):
        calls.append(tuple(weight.shape))
        return gemv(x, weight, bias)

    monkeypatch.setattr(linear_module, "gemv", record)
    return calls


@pytest.mark.gpu
def test_one_row_on_a_gpu_takes_the_kernel(gemv_calls):
    x, weight, bias = make_operands(1, device="cuda")
    torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert gemv_calls == [(8, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(0, torch.float32), (2, torch.float32), (1, torch.float64)]
)
def test_other_numbers_of_rows_and_other_types_are_left_to_torch(gemv_calls, num_rows, dtype):
    x, weight, bias = make_operands(num_rows, device="cuda", dtype=dtype)
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert not gemv_calls


def test_a_cpu_computes_with_torch(gemv_calls):
    x, weight, bias = make_operands(1, device="cpu")
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert not gemv_calls
