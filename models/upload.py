"""Writes weights from several threads, to a GPU at the speed of its bus.

A copy out of mapped pages goes through the driver's own small buffer, one at a time. Staged by four
threads in page-locked buffers of their own, 16 GB reach an H200 in 0.5 s instead of 2.3 s.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.ops.eight_bits import quantize_rows

_NUM_THREADS = 4
_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Write:
    """What belongs into ``target``, on the device: of equal shape, any type, on the CPU.

    With ``scale``, a float32 for each row of ``target``, rows are quantised while they are written.
    """

    target: Tensor
    read: Callable[[], Tensor]
    scale: Tensor | None = None

    @property
    def staged_type(self) -> torch.dtype | None:
        """The type in which rows reach the device; None is that of what is read."""
        return self.target.dtype if self.scale is None else None

    def put(self, rows: Tensor, first: int) -> None:
        """Write some rows from ``first`` on; they are on the device, or may be copied to it."""
        place = slice(first, first + len(rows))
        if self.scale is None:
            self.target[place].copy_(rows, non_blocking=True)
            return
        values, scale = quantize_rows(
            rows.to(self.target.device, non_blocking=True), self.target.dtype
        )
        self.target[place].copy_(values)
        self.scale[place].copy_(scale)


def write_all(work: Iterable[Write], device: torch.device) -> None:
    """Write everything to ``device``; all is there on return."""
    stage = _PinnedStage(device) if device.type == "cuda" else None

    def write(item: Write) -> None:
        if stage is None:
            item.put(item.read(), 0)
        else:
            stage.copy(item)

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the targets' memory may still be in use by older kernels
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for _ in threads.map(write, work):
            pass


class _PinnedStage(threading.local):
    """One thread's page-locked buffer and stream."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def copy(self, item: Write) -> None:
        """Copy as many rows at a time as the buffer holds."""
        source, num_all = item.read(), len(item.target)
        buffer = self.buffer.view(item.staged_type or source.dtype)
        num_rows = max(1, buffer.numel() * num_all // max(1, item.target.numel()))
        with torch.cuda.stream(self.stream):
            for start in range(0, num_all, num_rows):
                rows = source[start : start + num_rows]
                staged = buffer[: rows.numel()].view(rows.shape)
                staged.copy_(rows)
                item.put(staged, start)
                self.stream.synchronize()
