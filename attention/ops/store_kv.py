"""Everything between the qkv projection and attention in one launch: q/k-norm, rotation, K/V store.

One program takes as many heads of a token as there are KV heads, H: they are all of one kind::

    qkv of a token   | q 0..H-1 | q H..2H-1 | ... | k 0..H-1 | v 0..H-1 |    group = query heads / H
    program_id(1)         0           1              group     group + 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer
from octavo.attention.ops.dependent_launch import can_start_early, wait_for_inputs
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.sizes import next_power_of_2

WARP_ELEMENTS = 1024
"""Elements of a program that one warp takes: 32 a thread."""


def store_kv(
    layer: AttentionLayer, qkv: Tensor, *, inputs: AttentionInputs, cache: PagedKV
) -> tuple[Tensor, Tensor]:
    """Store k and v of all tokens of a step; return q and room for the step's output.

    Both are (num_tokens, num_heads, head_dim). q and k are normalised where the layer has weights
    for it, then rotated, in float32, rounded once; what a cache of 8 bits cannot hold is cut to its
    largest value. A token with a negative slot stores nothing and its output is zero, so that no
    attention kernel has to care for it; the other rows of the output are uninitialised.
    """
    num_tokens = qkv.shape[0]
    assert qkv.stride(1) == 1, f"elements of qkv are {qkv.stride(1)} apart"
    q = torch.empty(
        (num_tokens, layer.num_heads, layer.head_dim), dtype=qkv.dtype, device=qkv.device
    )
    out = torch.empty_like(q)
    group = layer.num_heads // layer.num_kv_heads
    heads_pad = next_power_of_2(layer.num_kv_heads)
    head_pad = next_power_of_2(layer.head_dim)
    starts_early = can_start_early(qkv)
    _store_kv_kernel[(num_tokens, group + 2)](
        q,
        out,
        cache.k,
        cache.v,
        qkv,
        layer.rotary,
        layer.q_norm,
        layer.k_norm,
        inputs.positions,
        inputs.slot_mapping,
        layer.norm_eps,
        qkv.stride(0),
        *cache.strides,
        NUM_KV_HEADS=layer.num_kv_heads,
        HEADS_PAD=heads_pad,
        GROUP=group,
        HEAD_DIM=layer.head_dim,
        HEAD_PAD=head_pad,
        ROTARY_DIM=layer.rotary.shape[1],
        BLOCK_SIZE=cache.block_size,
        PDL=starts_early,
        num_warps=min(max(heads_pad * head_pad // WARP_ELEMENTS, 1), 8),
        launch_pdl=starts_early,
    )
    return q, out


@triton.jit
def _store_kv_kernel(
    q_ptr,  # (num_tokens, GROUP * NUM_KV_HEADS, HEAD_DIM)
    out_ptr,  # like q
    k_cache_ptr,
    v_cache_ptr,
    qkv_ptr,  # (num_tokens, (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM)
    rotary_ptr,  # (max_positions, ROTARY_DIM) cos | sin
    q_norm_ptr,  # (HEAD_DIM,) or None
    k_norm_ptr,  # (HEAD_DIM,) or None
    positions_ptr,
    slots_ptr,
    norm_eps,
    stride_qkv,
    stride_block,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heads = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, HEAD_PAD)
    # All but qkv is older than the kernel in front: two loads in turn that need not wait for it.
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    has_angle = (d < ROTARY_DIM) & (chunk <= GROUP)
    HALF: tl.constexpr = ROTARY_DIM // 2
    angle = rotary_ptr + position * ROTARY_DIM + d % HALF
    cos = tl.load(angle, mask=has_angle, other=1.0)
    sin = tl.load(angle + HALF, mask=has_angle, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    if q_norm_ptr is not None:
        norm_ptr = q_norm_ptr
        if chunk >= GROUP:
            norm_ptr = k_norm_ptr
        has_norm = (d < HEAD_DIM) & (chunk <= GROUP)
        norm = tl.load(norm_ptr + d, mask=has_norm, other=0.0).to(tl.float32)
        partner_norm = tl.load(norm_ptr + partner, mask=has_angle, other=0.0).to(tl.float32)
    else:
        norm = None
        partner_norm = None
    wait_for_inputs(PDL)
    in_head = (heads < NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    source = qkv_ptr + token * stride_qkv + (chunk * NUM_KV_HEADS + heads)[:, None] * HEAD_DIM
    x = tl.load(source + d[None, :], mask=in_head, other=0.0)
    if chunk > GROUP:
        y = x.to(tl.float32)
    else:
        has_partner = in_head & has_angle[None, :]
        rotated = tl.load(source + partner[None, :], mask=has_partner, other=0.0)
        y = _norm_and_rotate(
            x.to(tl.float32),
            rotated.to(tl.float32),
            norm,
            partner_norm,
            cos,
            sin,
            norm_eps,
            HEAD_DIM,
        )
    if chunk < GROUP:
        target = token * (GROUP * NUM_KV_HEADS * HEAD_DIM) + chunk * (NUM_KV_HEADS * HEAD_DIM)
        target = target + heads[:, None] * HEAD_DIM + d[None, :]
        if slot < 0:
            tl.store(out_ptr + target, tl.zeros([HEADS_PAD, HEAD_PAD], tl.float32), mask=in_head)
        tl.store(q_ptr + target, y, mask=in_head)
    elif slot >= 0:
        cached = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        cached = cached + heads[:, None] * stride_head + d[None, :]
        if chunk == GROUP:
            tl.store(k_cache_ptr + cached, y, mask=in_head)
        else:
            tl.store(v_cache_ptr + cached, y, mask=in_head)


@triton.jit
def _norm_and_rotate(x, partner, norm, partner_norm, cos, sin, norm_eps, HEAD_DIM: tl.constexpr):
    """Return heads, normalised where there is a norm, and rotated, in float32.

    The rotation pairs element i with i + ROTARY_DIM / 2, its ``partner``, and back.
    """
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + norm_eps)
        x = x * inverse_rms[:, None] * norm[None, :]
        partner = partner * inverse_rms[:, None] * partner_norm[None, :]
    return x * cos[None, :] + partner * sin[None, :]
