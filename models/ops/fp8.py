"""Rows in 8-bit floats (e4m3: 3 bits of mantissa, up to 448), each with a scale of its own.

A row's largest magnitude becomes 448. Within 2**-14 of it the relative error of an element is at
most 2**-4, for smaller ones the absolute error is at most 2**-10 times the scale.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


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
    return values.float().mul_(scale[:, None]).to(dtype)
