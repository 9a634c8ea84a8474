"""What attention computes around its softmax, in functions to be compiled.

They compute what ``CpuAttention`` does with a dozen operations of torch; compiled, each is a call.
All tensors are contiguous, and ``lines`` are those of ``CpuBackend``: K and V of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def turn_and_store(
    qkv: Tensor,
    table: Tensor,
    lines: Tensor,
    targets: Tensor,
    *norms: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """Normalise and rotate q and k, store k and v, return all in their own type.

    ``table`` is cos | sin of each token, (num_tokens, rotary_dim), ``targets`` its line; ``norms``
    are the weights of q and of k, or none. What is stored and what is returned, (num_tokens,
    num_heads + 2 * num_kv_heads, head_dim), is rounded once.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    x = heads[:, : num_heads + num_kv_heads].float()
    if norms:
        parts = x.split_with_sizes([num_heads, num_kv_heads], dim=1)
        x = torch.cat([_normalise(*pair, eps) for pair in zip(parts, norms, strict=True)], dim=1)
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)  # (num_tokens, 1, half)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    qk = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
    v = heads[:, num_heads + num_kv_heads :]
    kv = torch.cat([part.to(lines.dtype) for part in (qk[:, num_heads:], v)], dim=1)
    lines.index_copy_(0, targets, kv.flatten(1))
    return torch.cat((qk.to(qkv.dtype), v), dim=1)


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.float()


def attend_tile(
    heads: Tensor,
    lines: Tensor,
    seen: Tensor,
    bias: Tensor,
    *,
    num_kv_heads: int,
    scale: float,
) -> Tensor:
    """Attend from one token of each row to the lines it sees.

    ``heads`` is what ``turn_and_store`` returns of these tokens; q is read of it. ``seen`` are
    (num_rows * width,) lines, ``bias`` is (num_rows, 1, 1, width). Returns (num_rows, num_heads *
    head_dim).
    """
    num_rows, num_heads, head_dim = heads.shape
    shape = (num_rows, bias.shape[-1], 2, num_kv_heads, head_dim)
    k, v = lines.index_select(0, seen).view(shape).transpose(1, 3).unbind(2)
    q = heads[:, : num_heads - 2 * num_kv_heads].to(lines.dtype)
    q = q.reshape(num_rows, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale).flatten(1)


def attend_row(
    heads: Tensor, lines: Tensor, seen: Tensor, *, num_kv_heads: int, scale: float
) -> Tensor:
    """Do what ``attend_tile`` does for a single row, (1, num_heads * head_dim), by plain sums."""
    num_heads, head_dim = heads.shape[1:]
    k, v = lines.index_select(0, seen).view(-1, 2, num_kv_heads, 1, head_dim).float().unbind(1)
    q = heads[0, : num_heads - 2 * num_kv_heads].float().view(num_kv_heads, -1, head_dim)
    weights = ((k * q).sum(dim=-1, keepdim=True) * scale).softmax(dim=0)  # (width, ..., 1)
    return (v * weights).sum(dim=0).view(1, -1).to(lines.dtype)
