"""Where a linear layer's product is computed: one row on a GPU here, anything else by torch.

On a CPU, oneDNN multiplies one to sixteen rows up to three times as fast when the weight lies in
blocks of its own choosing: ``PackedWeight`` is made once and serves any number of rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.gemv import gemv

GEMV_TYPES = (torch.bfloat16, torch.float16, torch.float32)

TYPICAL_NUM_ROWS = 64
"""The number of rows that weights are packed for; hints of 16 and 64 give the same speed."""
OCTAVE_BITS = 3
"""Of the numbers of rows from 16 to 31 eight are computed, of those from 32 to 63 eight, ..."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, (num_rows, out_features), of x (num_rows, in_features)."""
    if x.is_cuda and len(x) == 1 and x.dtype in GEMV_TYPES:
        return gemv(x, weight, bias)
    return functional.linear(x, weight, bias)


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
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return y[:num_rows]


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
