"""Products of several rows with weights in 8-bit floats that have one scale per output.

Which form is used depends on the number of rows and their type alone::

    rows                     activations            weight
    bfloat16, on a GPU       8-bit, a scale a row   as it is: the matrix units multiply 8-bit floats
    others, and on a CPU     as they are            dequantised for each product
"""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.fp8 import dequantize_rows
from octavo.models.ops.quantize import quantize

MULTIPLE = 16
"""What numbers of inputs and outputs must be a multiple of for torch's 8-bit product."""


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ (weight * scale[:, None]).T + bias``, (num_rows, out_features).

    x is (num_rows, in_features) of any float type, weight e4m3, scale (out_features,) float32.
    """
    if can_multiply_scaled(x, weight):
        return multiply_scaled(x, weight, scale, bias)
    return functional.linear(x, dequantize_rows(weight, scale, x.dtype), bias)


def can_multiply_scaled(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has an 8-bit product for these operands."""
    is_even = all(size % MULTIPLE == 0 for size in weight.shape)
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and is_even


def multiply_scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply 8-bit floats: each row of x is quantised, with a scale of its own."""
    values, row_scale = quantize(x)
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=row_scale[:, None],
        scale_b=scale[None, :],
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
