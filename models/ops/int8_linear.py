"""Products of 8-bit integers on a CPU: weights and activations, exact sums in 32 bits.

A weight has one scale for each output, an activation one for each row. What a row gives does not
depend on the rows beside it, not even in its last bit: integers add up alike in any order.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.linear import round_up

LARGEST = 127
SMALLEST_SCALE = 1e-30
"""Rows of zeros have a scale, too."""
MAX_ROTATED = 64
"""Inputs that are rotated together: 16 lose a little, 512 gain nothing."""
MAX_STREAMED_ROWS = 8
"""Rows of a large weight that fbgemm multiplies faster than oneDNN does on matrix units."""

_PLAIN: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
"""No bias, no scale of the output, float32, and nothing applied to it."""


PARTS = ("values", "scales")


def round_to_int8(weight: Tensor, *, rotates_inputs: bool = False) -> dict[str, Tensor]:
    """Round a weight to eight bits; return the ``PARTS`` that it is packed of.

    Where some inputs are much larger than others, ``rotates_inputs`` rotates the weight as
    ``Int8Weight`` then rotates them, so that the product stays.
    """
    weight = weight.detach().float()
    if rotates_inputs:
        weight = _rotate(weight, _make_rotation_of(weight.shape[1]))
    values, scales = quantize_rows(weight)
    return {"values": values, "scales": scales.flatten()}


class Int8Weight:
    """A weight rounded to eight bits, in oneDNN's blocks, of its parts.

    oneDNN takes one scale for all activations: it is left at 1, and rows are scaled afterwards.
    ``rotates_inputs`` spreads large inputs over their neighbours before they are rounded. One that
    ``is_large`` comes from memory in every step; on matrix units (AMX) oneDNN reads that at half of
    its speed, so few rows have a second form of it, fbgemm's, which gives the same bits.
    """

    def __init__(
        self, parts: Mapping[str, Tensor], *, rotates_inputs: bool = False, is_large: bool = False
    ) -> None:
        values = parts["values"]
        self._rotation = _make_rotation_of(values.shape[1]) if rotates_inputs else None
        self._scales = parts["scales"]
        self._zero_points = torch.zeros(len(values), dtype=torch.int32)
        self._blocks = torch.ops.onednn.qlinear_prepack(values, None)
        self._streamed = _pack_streamed(values, self._scales) if is_large else None

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, (num_rows, out_features), of x (num_rows, in_features).

        A row with a value that is not finite gives no finite values.
        """
        if self._rotation is not None:
            x = _rotate(x, self._rotation)
        rounded, row_scales = _round_rows(x)
        y = self._multiply(rounded).mul_(row_scales)
        return y if bias is None else y.add_(bias)

    def _multiply(self, rounded: Tensor) -> Tensor:
        """Return the product with whole numbers in float32, (num_rows, in_features)."""
        num_rows = rounded.shape[0]
        if self._streamed is not None and 0 < num_rows <= MAX_STREAMED_ROWS:
            y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
                rounded, 1.0, LARGEST + 1, self._streamed
            )
            return y
        values = rounded.to(torch.int8)
        if (padding := round_up(num_rows) - num_rows) > 0:
            values = functional.pad(values, (0, 0, 0, padding))
        weight = self._blocks, self._scales, self._zero_points
        y = torch.ops.onednn.qlinear_pointwise.default(values, 1.0, 0, *weight, *_PLAIN)
        return y[:num_rows]


def _pack_streamed(values: Tensor, scales: Tensor) -> Any:
    """Return fbgemm's form of a weight; None where oneDNN is as fast, or torch has none."""
    has_fbgemm = hasattr(torch, "_make_per_channel_quantized_tensor")
    if not (has_fbgemm and torch.cpu._is_amx_tile_supported()):
        return None
    zero_points = torch.zeros(len(values), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what a later torch may lack
        weight = torch._make_per_channel_quantized_tensor(values, scales.double(), zero_points, 0)
    return torch.ops.quantized.linear_prepack(weight, None)


def make_rotation(size: int) -> Tensor:
    """Return an orthogonal matrix without large entries: cosines (DCT-II), float32."""
    index = torch.arange(size, dtype=torch.float64)
    cosines = torch.cos(math.pi / size * (index + 0.5) * index[:, None]) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.float()


def _make_rotation_of(num_inputs: int) -> Tensor:
    return make_rotation(math.gcd(num_inputs, MAX_ROTATED))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring inputs of (num_rows, in_features) with each other."""
    return (x.reshape(-1, len(rotation)) @ rotation).view(x.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and scales, (num_rows, 1), whose product is nearest to float32 ``x``."""
    rounded, scales = _round_rows(x)
    return rounded.to(torch.int8), scales


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``quantize_rows`` does, the values still in float32."""
    scales = x.abs().amax(dim=1, keepdim=True)  # a norm takes four times as long with 16 rows
    scales = scales.mul_(1 / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (x / scales).round_(), scales


def can_quantize() -> bool:
    """Return whether this CPU multiplies 8-bit integers at full speed and without saturation."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()
