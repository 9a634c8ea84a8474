"""Rows in 8 bits, floats (e4m3: 3 bits of mantissa, up to 448) or integers, with a scale each.

A row's largest magnitude becomes the largest of the type. Of e4m3 the relative error of an element
within 2**-14 of it is at most 2**-4, for smaller ones the absolute error is at most 2**-10 times
the scale; of integers an element is off by at most half the scale.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8 = torch.int8
LARGEST = {FP8: FP8_MAX, INT8: 127.0}
SHIFT = 2.0**120
"""What separates the biases of the exponents of e4m3, 7, and float32, 127."""
_FIELDS = -(2**31) + 2**27 - 1
"""All bits of a float32 but the highest four of its exponent."""


def quantize_rows(rows: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Return (n, k) in 8 bits, rounded to nearest, and the scales, (n,) float32.

    A row that is not finite stays so. A row of zeros has the scale 1.
    """
    rows = rows.float()
    largest = LARGEST[dtype]
    scale = rows.abs().amax(dim=1) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = (rows / scale[:, None]).clamp(-largest, largest)
    return (values.round_() if dtype == INT8 else values).to(dtype), scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values * scale[:, None]``, computed in float32 and rounded once."""
    is_shifted = values.dtype == FP8 and values.device.type == "cpu"
    floats = _shift(values) if is_shifted else values.float()
    return floats.mul_(scale[:, None]).to(dtype)


def _shift(values: Tensor) -> Tensor:
    """Return finite values of e4m3 in float32, on a CPU four times as fast as torch does.

    Sign, exponent and mantissa move to their places; only the exponent's bias differs.
    """
    bits = values.view(torch.int8).to(torch.int32)
    return bits.bitwise_left_shift_(20).bitwise_and_(_FIELDS).view(torch.float32).mul_(SHIFT)


def spread_nan(values: Tensor, scale: Tensor) -> None:
    """Make the scales of rows that hold NaN NaN, too: on a CPU it is known by them alone."""
    if values.dtype == FP8:  # integers have none
        is_nan = values.view(torch.int8).bitwise_and(0x7F) == 0x7F
        scale.masked_fill_(is_nan.any(dim=1), torch.nan)
