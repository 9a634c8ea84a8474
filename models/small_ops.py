"""What a layer computes between its products, in two functions to be compiled.

They compute what ``FlatNetwork`` does with seven operations of torch; compiled, each is a call.
All tensors are contiguous. Where nothing else is said they have the type of a product's output.
"""

from torch import Tensor
from torch.nn import functional


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
