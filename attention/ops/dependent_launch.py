"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Its programs are placed, and read what never changes (weights), before they wait for the kernel in
front; at one row a third of a small model's step is otherwise spent between kernels::

    kernel 1   place |  wait | work ........|
    kernel 2          place, read weights   | wait ends, work ...|

A kernel that takes part calls ``wait_for_inputs`` once in every program, before it reads anything
that a kernel writes and before it writes anything. It lets the next one start only then, so all
kernels but the last in front of any program have ended; ``python -m tests.early_loads`` looks for
breaches in the machine code. On devices before Hopper and for more rows,
where programs find no room beside each other, kernels follow each other as always.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 1


def can_start_early(x: Tensor) -> bool:
    """Return whether kernels over the rows of ``x`` are launched so; they get it as PDL."""
    return x.is_cuda and x.shape[0] <= MAX_ROWS and _is_hopper(x.device)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel in front, then let the one behind start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
