"""Rows in 8-bit floats (e4m3: 3 bits of mantissa, up to 448), each with a scale of its own.

A row's largest magnitude becomes 448. Within 2**-14 of it the relative error of an element is at
most 2**-4, for smaller ones the absolute error is at most 2**-10 times the scale.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SHIFT = 2.0**120
"""What separates the biases of the exponents of e4m3, 7, and float32, 127."""
_FIELDS = -(2**31) + 2**27 - 1
"""All bits of a float32 but the highest four of its exponent."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n, k) in e4m3, rounded to nearest, and the scales, (n,) float32.

    A row that is not finite stays so. A row of zeros has the scale 1.
    """
    rows = rows.float()
    scale = rows.abs().amax(dim=1) / FP8_MAX
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (rows / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values * scale[:, None]``, computed in float32 and rounded once."""
    floats = _shift(values) if values.device.type == "cpu" else values.float()
    return floats.mul_(scale[:, None]).to(dtype)


def _shift(values: Tensor) -> Tensor:
    """Return finite values in float32, on a CPU four times as fast as torch converts them.

    Sign, exponent and mantissa move to their places; only the exponent's bias differs.
    """
    bits = values.view(torch.int8).to(torch.int32)
    return bits.bitwise_left_shift_(20).bitwise_and_(_FIELDS).view(torch.float32).mul_(SHIFT)


def spread_nan(values: Tensor, scale: Tensor) -> None:
    """Make the scales of rows that hold NaN NaN, too: on a CPU it is known by them alone."""
    is_nan = values.view(torch.int8).bitwise_and(0x7F) == 0x7F
    scale.masked_fill_(is_nan.any(dim=1), torch.nan)
