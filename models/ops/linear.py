"""Where a linear layer's product is computed: on a GPU up to 128 rows here, the rest by torch.

With so few rows a step is a chain of short kernels, so norm, activation and residual sum are folded
into the products beside them. With more, torch's product adds to the residual stream.

On a CPU, oneDNN multiplies one to sixteen rows up to three times as fast when the weight lies in
blocks of its own choosing: ``PackedWeight`` is made once and serves any number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.activation import silu_mul
from octavo.models.ops.gemv import MAX_NORMED, gemv
from octavo.models.ops.linear_hopper import can_multiply_on_hopper, multiply_on_hopper
from octavo.models.ops.norm import Norm, Normed, Product, rms_norm
from octavo.models.ops.scaled_linear import scaled_linear

GEMV_TYPES = (torch.bfloat16, torch.float16, torch.float32)

TYPICAL_NUM_ROWS = 64
"""The number of rows that weights are packed for; hints of 16 and 64 give the same speed."""
OCTAVE_BITS = 3
"""Of the numbers of rows from 16 to 31 eight are computed, of those from 32 to 63 eight, ..."""


def linear(
    x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias``, (num_rows, out_features), of x (num_rows, in_features).

    With ``scale``, a factor for each output, the weight is of 8-bit floats.
    """
    if (multiply := find_kernel(x, weight)) is not None:
        return multiply(x, weight, bias, scale=scale).out
    if isinstance(x, Normed):
        x = x.apply()
    if scale is not None:
        return scaled_linear(x, weight, scale, bias)
    return functional.linear(x, weight, bias)


def linear_silu_mul(
    x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up, (num_rows, size), of the product gate | up."""
    if (multiply := find_kernel(x, weight)) is not None:
        return multiply(x, weight, bias, scale=scale, is_gated=True).out
    return gate(linear(x, weight, bias, scale=scale))


def gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (num_rows, size), of gate | up, which may be overwritten."""
    if gate_up.is_cuda:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    # In place: fresh memory for a long prompt costs more than the arithmetic.
    return functional.silu(gate, inplace=True).mul_(up)


def linear_add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scale: Tensor | None,
    residual: Tensor,
    norm: Norm,
) -> tuple[Tensor | Normed, Tensor] | None:
    """Return the normalised sum of product and ``residual``, and the sum; None if nothing is saved.

    ``residual`` may be overwritten.
    """
    multiply = find_kernel(x, weight)
    if multiply is None:
        if not x.is_cuda or bias is not None or scale is not None:
            return None
        total = residual.addmm_(x, weight.t())
        return rms_norm(total, norm.weight, eps=norm.eps), total
    # Rows that still lack their factor may be too large for float16.
    if x.dtype == torch.float16 or (multiply is gemv and len(weight) > MAX_NORMED):
        return None
    product = multiply(x, weight, bias, scale=scale, residual=residual, norm=norm)
    assert product.values is not None
    return Normed(product.values, product.out, product.square_sums, norm), product.out


def find_kernel(x: Tensor | Normed, weight: Tensor) -> Callable[..., Product] | None:
    """Return the kernel that multiplies with so many rows; None where torch does."""
    values = x.values if isinstance(x, Normed) else x
    if not values.is_cuda:
        return None
    if len(values) == 1 and values.dtype in GEMV_TYPES:
        return gemv
    return multiply_on_hopper if can_multiply_on_hopper(values, weight) else None


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


class PackedWeight:
    """A copy of a weight in oneDNN's blocks; the weight itself is not needed any more."""

    def __init__(self, weight: Tensor) -> None:
        assert can_pack(weight), f"oneDNN does not pack {weight.dtype} on {weight.device}"
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_NUM_ROWS)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what ``linear`` returns for the weight, up to rounding.

        oneDNN compiles for every number of rows and keeps the code, half a megabyte a time: few
        different numbers are asked of it, filled up with zeros.
        """
        num_rows = len(x)
        if (padding := round_up(num_rows) - num_rows) > 0:
            x = functional.pad(x, (0, 0, 0, padding))
        y: Tensor = _linear_pointwise(x, self._blocks, bias, "none", [], "")
        return y[:num_rows] if padding else y


def round_up(num_rows: int) -> int:
    """Return the number of rows that is computed: at most an eighth more."""
    step = 1 << max(0, num_rows.bit_length() - 1 - OCTAVE_BITS)
    return -(-num_rows // step) * step


def can_pack(weight: Tensor) -> bool:
    """Return whether this machine multiplies with packed weights of this type and device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
