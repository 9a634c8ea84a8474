"""Where a linear layer's product is computed: one row on a GPU here, anything else by torch."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.gemv import gemv

GEMV_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, (num_rows, out_features), of x (num_rows, in_features)."""
    if x.is_cuda and len(x) == 1 and x.dtype in GEMV_TYPES:
        return gemv(x, weight, bias)
    return functional.linear(x, weight, bias)
