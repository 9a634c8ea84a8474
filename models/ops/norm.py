"""RMSNorm of rows, alone or after adding to the residual stream; one program takes one row.

Both read and write each element once, so their floor is bytes / bandwidth: 8 bytes an element of a
bfloat16 residual stream (x, residual, sum, output), 4 without it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.dependent_launch import can_start_early, wait_for_inputs
from octavo.attention.ops.sizes import next_power_of_2


@dataclass(frozen=True, slots=True)
class Norm:
    """What normalises the residual stream: x / rms(x) * weight."""

    weight: Tensor  # (size,)
    eps: float


@dataclass(frozen=True, slots=True)
class Normed:
    """Normalised rows but for a factor each, 1 / rms, which a product applies to its sums instead.

    So the product that makes the stream needs not wait for whole rows, and nobody else has to.
    """

    values: Tensor  # (num_rows, size): the stream times the norm's weight
    stream: Tensor  # (num_rows, size)
    square_sums: Tensor | None  # (num_parts, num_rows) float32, of the stream, if known
    norm: Norm

    def apply(self) -> Tensor:
        """Return the normalised rows."""
        return rms_norm(self.stream, self.norm.weight, eps=self.norm.eps)


def take_apart(x: Tensor | Normed) -> tuple[Tensor, Tensor | None, float]:
    """Return rows and, of those that lack their factor, what it is found from: squares, epsilon."""
    if not isinstance(x, Normed):
        return x, None, 0.0
    assert x.square_sums is not None, "sums of squares come with the rows"
    return x.values, x.square_sums, x.norm.eps


@dataclass(frozen=True, slots=True)
class Product:
    """What a product with folded neighbours makes."""

    out: Tensor  # (num_rows, num_outputs)
    values: Tensor | None = None  # given a norm: out times its weight
    square_sums: Tensor | None = None  # (num_parts, num_rows) float32, of out, where it makes them

    @classmethod
    def allocate(cls, out: Tensor, norm: Norm | None, *, num_parts: int) -> "Product":
        """Return ``out`` with memory for what is made of it for the norm, if there is one."""
        if norm is None:
            return cls(out)
        square_sums = out.new_empty((num_parts, len(out)), dtype=torch.float32)
        return cls(out, torch.empty_like(out), square_sums)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return ``x / rms(x) * weight`` of every row of (num_rows, size).

    Arithmetic is float32, rounded once. Rows may be apart by any stride. ``out`` may be ``x``;
    given, nothing is allocated.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, None, weight, eps, (out, None))
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the normalised sum of ``x`` and ``residual``, and the sum, both (num_rows, size).

    The sum is rounded to its own type before it is normalised, as if it had been stored and read
    again. ``out`` is (normalised, sum) and may be (x, residual); given, nothing is allocated.
    """
    normalised, total = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    _launch(x, residual, weight, eps, (normalised, total))
    return normalised, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    outputs: tuple[Tensor, Tensor | None],
) -> None:
    out, total = outputs
    num_rows, size = x.shape
    rows = [tensor for tensor in (x, residual, out, total) if tensor is not None]
    assert all(tensor.stride(1) == 1 for tensor in rows), "elements of a row must be contiguous"
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    starts_early = can_start_early(x)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        total.stride(0) if total is not None else 0,
        SIZE=size,
        BLOCK=block,
        PDL=starts_early,
        # 16 bytes of bfloat16 a thread and load, within 1 to 16 warps.
        num_warps=max(1, min(16, block // 256)),
        launch_pdl=starts_early,
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # (num_rows, SIZE)
    residual_ptr,  # like x, or None
    weight_ptr,  # (SIZE,)
    out_ptr,
    total_ptr,  # like x, or None
    eps,
    stride_x,
    stride_residual,
    stride_out,
    stride_total,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < SIZE
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride_x + column, mask=in_row, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        source = residual_ptr + row * stride_residual + column
        x += tl.load(source, mask=in_row, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * stride_total + column, total, mask=in_row)
        x = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * stride_out + column, x * inverse_rms * weight, mask=in_row)
