"""What a layer computes, in functions to be compiled; with weights of four bits, products included.

They compute what ``FlatNetwork`` does with many operations of torch; compiled, each is a call. All
tensors are contiguous. Where nothing else is said they have the type of a product's output.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.small_ops import turn_and_store
from octavo.models.ops.int4_linear import GROUP_SIZE


def add_norm(residual: Tensor, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add x, (num_rows, hidden_size), to the residual stream and return that normalised.

    Residual stream and weight have the network's own type.
    """
    residual += x
    total = residual.float()
    mean = total.square().mean(dim=-1, keepdim=True)
    return (total * (mean + eps).rsqrt() * weight.float()).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (num_rows, size), of gate | up; computed in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def project_int4(x: Tensor, weight: Tensor, scales: Tensor, *place: Tensor, **sizes: Any) -> Tensor:
    """Map normalised rows, (num_rows, hidden_size), to what ``turn_and_store`` returns.

    It gets ``place`` and ``sizes``, behind q, k and v.
    """
    return turn_and_store(_multiply_int4(x, weight, scales), *place, **sizes)


def finish_int4(attended: Tensor, residual: Tensor, *weights: Tensor, eps: float) -> Tensor:
    """Do the rest of a layer, of what was attended to, (num_rows, num_heads * head_dim).

    Adds to the residual stream, (num_rows, hidden_size), and returns it normalised for the next
    layer, in its own type.
    """
    output, output_scales, mlp_norm, *feed_forward = weights
    gate_up, gate_up_scales, down, down_scales, next_norm = feed_forward
    x = add_norm(residual, _multiply_int4(attended, output, output_scales), mlp_norm, eps=eps)
    x = silu_mul(_multiply_int4(x, gate_up, gate_up_scales))
    x = _multiply_int4(x, down, down_scales)
    return add_norm(residual, x.to(residual.dtype), next_norm, eps=eps)


def _multiply_int4(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return x @ weight.T, (num_rows, out_features), of ``Int4Weight.values`` or ``tiles``.

    Tiles are for inductor's own product alone: torch's operator reads another order.
    """
    return torch._weight_int4pack_mm_for_cpu(x.bfloat16(), weight, GROUP_SIZE, scales)
