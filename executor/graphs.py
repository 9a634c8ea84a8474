"""CUDA graphs of decode steps: two for each batch size, *forward* and *sample*.

A graph is captured when it is needed for the second time: before the engine is ready or, for sizes
that only some loads use, between two steps. The first time its kernels are launched singly, which
compiles them. All graphs share one memory pool: they run one after the other on one stream, and
what a graph leaves behind is used before the next one runs.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from octavo.executor.step_program import StepProgram

logger = logging.getLogger(__name__)

Part = Literal["forward", "sample", "sample with edits"]

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
        self._compiled: set[tuple[int, Part]] = set()
        self._graphs: dict[tuple[int, Part], torch.cuda.CUDAGraph | None] = {}
        """None where capture failed: it is not tried again."""
        self._pool = torch.cuda.graph_pool_handle() if self._sizes else None

    @property
    def captured_sizes(self) -> list[int]:
        """The sizes whose forward pass is a graph."""
        return sorted(
            size for (size, part), graph in self._graphs.items() if part == "forward" and graph
        )

    def find_size(self, num_rows: int) -> int | None:
        """Return the size that a step of so many rows is padded to; None if none is."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def run(self, size: int, *, has_edits: bool) -> StepProgram:
        """Launch a step of ``size`` rows whose upload is on its way; returns its program."""
        program = self._find_program(size)
        edited = self._edited.take() if has_edits else None
        is_graph = self._launch(size, "forward", program.forward)
        part: Part = "sample with edits" if has_edits else "sample"
        if is_graph:  # the logits are always in the same place
            self._launch(size, part, lambda: program.sample(edited))
        else:
            program.sample(edited)
            self._compiled.add((size, part))
        return program

    def _launch(self, size: int, part: Part, launch: Callable[[], None]) -> bool:
        """Launch a part, captured if it has run before; returns whether it was a graph."""
        key = size, part
        if key in self._compiled and key not in self._graphs:
            self._graphs[key] = self._capture(size, part, launch)
        if graph := self._graphs.get(key):
            graph.replay()
            return True
        launch()
        self._compiled.add(key)
        return False

    def _capture(
        self, size: int, part: Part, launch: Callable[[], None]
    ) -> torch.cuda.CUDAGraph | None:
        """Return the graph of what ``launch`` launches; None, with a warning, if it fails."""
        started_s = time.perf_counter()
        try:
            graph = self._record(launch)
        except RuntimeError:  # out of memory, or a launch that cannot be captured
            logger.warning(
                "cannot capture %s of %d rows: its kernels are launched singly from now on",
                part,
                size,
                exc_info=True,
            )
            return None
        logger.info("captured %s of %d rows in %.2f s", part, size, time.perf_counter() - started_s)
        return graph

    def _find_program(self, size: int) -> StepProgram:
        if size not in self._programs:
            self._programs[size] = self._create(size)
        return self._programs[size]

    def _record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:  # the stream must leave capture mode, whatever launch raised
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
