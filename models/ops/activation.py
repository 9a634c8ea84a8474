"""The gated activation between the two products of a feed-forward block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.dependent_launch import can_start_early, wait_for_inputs
from octavo.attention.ops.sizes import cdiv

BLOCK = 1024  # 8 elements, 16 bytes of bfloat16, in each of 128 threads


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, (num_rows, size), of gate | up, (num_rows, 2 * size).

    Arithmetic is float32, rounded once. Given ``out``, nothing is allocated. Floor: 6 bytes of
    bfloat16 an output element.
    """
    num_rows, double_size = gate_up.shape
    size = double_size // 2
    if out is None:
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == out.stride(1) == 1, "elements of a row must be contiguous"
    starts_early = can_start_early(gate_up)
    if num_rows:
        _silu_mul_kernel[(num_rows, cdiv(size, BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=BLOCK,
            PDL=starts_early,
            num_warps=4,
            launch_pdl=starts_early,
        )
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # (num_rows, 2 * SIZE)
    out_ptr,  # (num_rows, SIZE)
    stride_gate_up,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < SIZE
    source = gate_up_ptr + row * stride_gate_up + column
    gate = tl.load(source, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, gate * tl.sigmoid(gate) * up, mask=in_row)
