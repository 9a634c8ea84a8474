"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Its programs are placed, and read what never changes (weights), before they wait for the kernel in
front; at one row a third of a small model's step is otherwise spent between kernels::

    kernel 1   place |  wait | work ........|
    kernel 2          place, read weights   | wait ends, work ...|

A kernel that takes part calls ``wait_for_inputs`` once in every program, before it reads anything
that the kernel in front writes and before it writes anything. It lets the next one start only then,
so all kernels but the last in front of any program have ended: what the first kernels of a step
wrote may be read early, too. Compilers move loads: ``python -m tests.early_loads`` looks for
breaches in the machine code. On devices before Hopper kernels follow each other as always.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 64
"""With more, programs find no room beside those that still work."""


def can_start_early(x: Tensor, *, max_rows: int = MAX_ROWS) -> bool:
    """Return whether kernels over the rows of ``x`` are launched so; they get it as PDL."""
    return x.is_cuda and x.shape[0] <= max_rows and is_hopper(x.device)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel in front, then let the one behind start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device has what Hopper brought: early starts, bulk copies."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch_lines(addresses):
    """Ask for the cache lines at these addresses to come into L2, and wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
