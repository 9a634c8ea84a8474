"""CUDA graphs of decode steps: two for each batch size, *forward* and *sample*.

A size is captured before the engine is ready or, for sizes that only some loads use, between two
steps when it is needed for the second time. All graphs share one memory pool: they run one after
the other on one stream, and what a graph leaves behind is used before the next one runs.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.executor.step_program import StepProgram

logger = logging.getLogger(__name__)

EAGER_SIZES = (1, 2, 4, 8)
"""Captured before the engine is ready: the sizes of a few interactive users."""


def default_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes worth a graph: padding costs at most 1 row in 8, beyond 8 rows."""
    sizes = [1, 2, 4]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, size // 8 // 8 * 8)
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeGraphs:
    """Runs decode steps of any number of rows, padded to a size, captured or not."""

    def __init__(
        self, sizes: Sequence[int], create: Callable[[int], StepProgram], *, edited: "EditScratch"
    ) -> None:
        self._sizes = sorted(sizes)
        self._create = create
        self._edited = edited
        self._programs: dict[int, StepProgram] = {}
        self._uses: Counter[int] = Counter()
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._sample: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._sizes else None

    def find_size(self, num_rows: int) -> int | None:
        """Return the size that a step of so many rows is padded to; None if none is."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def run(self, size: int, *, has_edits: bool) -> StepProgram:
        """Launch a step of ``size`` rows whose upload is on its way; returns its program."""
        program = self._find_program(size)
        self._uses[size] += 1
        if size not in self._forward and self._uses[size] > 1:
            self.capture(size)
        if size not in self._forward:
            program.forward()
            program.sample(self._edited.take() if has_edits else None)
            return program
        if (size, has_edits) not in self._sample:
            self._capture_sample(size, has_edits=has_edits)
        self._forward[size].replay()
        self._sample[size, has_edits].replay()
        return program

    def capture(self, size: int) -> None:
        """Capture a size; the step that is in the upload buffer is not run."""
        started_s = time.perf_counter()
        program = self._find_program(size)
        self._forward[size] = self._record(program.forward)
        self._capture_sample(size, has_edits=False)
        logger.info("captured %d rows in %.2f s", size, time.perf_counter() - started_s)

    def _capture_sample(self, size: int, *, has_edits: bool) -> None:
        program = self._find_program(size)
        edited = self._edited.take() if has_edits else None
        self._sample[size, has_edits] = self._record(lambda: program.sample(edited))

    def _find_program(self, size: int) -> StepProgram:
        if size not in self._programs:
            self._programs[size] = self._create(size)
        return self._programs[size]

    def _record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what ``launch`` launches. Its kernels must have run before: they are compiled."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        return graph


class EditScratch:
    """The float32 copy of the logits that edits are made in; allocated when first needed."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._memory: Tensor | None = None

    def take(self) -> Tensor:
        """Return the scratch, (max_rows, vocab_size)."""
        if self._memory is None:
            self._memory = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return self._memory
