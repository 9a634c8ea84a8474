"""Products of several rows with weights in 8 bits that have one scale per output.

Which form is used depends on the number of rows and the types alone::

    weight      rows                     activations            the weight is
    e4m3        bfloat16, on a GPU       8-bit, a scale a row   multiplied by the matrix units
    int8        on a GPU                 as they are            converted in registers
    either      others, and on a CPU     as they are            dequantised for each product
"""

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.eight_bits import FP8, INT8, dequantize_rows
from octavo.models.ops.hopper_tiles import is_tuned_for
from octavo.models.ops.linear_converted import multiply_converted
from octavo.models.ops.quantize import quantize

logger = logging.getLogger(__name__)

MULTIPLE = 16
"""What numbers of inputs and outputs must be a multiple of for torch's 8-bit product."""


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ (weight * scale[:, None]).T + bias``, (num_rows, out_features).

    x is (num_rows, in_features) of any float type, weight e4m3 or int8, scale (out_features,)
    float32.
    """
    if can_multiply_scaled(x, weight):
        y = multiply_scaled(x, weight, scale)
        if y is not None:
            return y if bias is None else y.add_(bias)
    if can_convert(x, weight):
        return multiply_converted(x, weight, scale, bias)
    return functional.linear(x, dequantize_rows(weight, scale, x.dtype), bias)


def can_multiply_scaled(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has an 8-bit product for these operands."""
    is_even = all(size % MULTIPLE == 0 for size in weight.shape)
    is_fast = x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == FP8
    return is_fast and len(x) > 0 and is_even


def can_convert(x: Tensor, weight: Tensor) -> bool:
    """Return whether a kernel of our own is faster than to write the dequantised weight."""
    is_fast = x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == INT8
    return is_fast and len(x) > 0 and is_tuned_for(x.device)


def multiply_scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    """Multiply 8-bit floats: each row of x is quantised, with a scale of its own.

    None where cuBLAS has no such product for these shapes, which is logged. It lacks some with a
    bias, so it is never given one.
    """
    values, row_scale = quantize(x)
    try:
        return torch._scaled_mm(
            values,
            weight.t(),
            scale_a=row_scale[:, None],
            scale_b=scale[None, :],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    except RuntimeError as error:
        if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
            raise
        _warn_of_shape(len(x), *weight.shape)
        return None


@cache
def _warn_of_shape(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    logger.warning(
        "cuBLAS has no 8-bit product of %d rows with a weight of %d x %d: it is dequantised",
        num_rows,
        num_outputs,
        num_inputs,
    )
