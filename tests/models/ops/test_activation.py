"""The gated activation against torch in float64."""

import pytest
import torch

from octavo.models.ops.activation import BLOCK, silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10}
if DEVICE == "cuda":  # the interpreter cuts where the device rounds
    TOLERANCE[torch.bfloat16] = 2**-8


def expect(gate_up):
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (2, BLOCK + 40)])
def test_gated_rows_equal_torch(shape, dtype):
    num_rows, size = shape
    gate_up = (torch.randn(num_rows, 2 * size, device=DEVICE) * 3).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    assert silu_mul(gate_up, out=out) is out
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expect(gate_up), rtol=tolerance, atol=tolerance)


def test_without_an_output_a_new_one_is_returned():
    gate_up = torch.randn(2, 16, device=DEVICE)
    torch.testing.assert_close(silu_mul(gate_up).double(), expect(gate_up), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_large_gates_do_not_overflow():
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    assert silu_mul(gate_up).tolist() == [[-0.0, 200.0]]
