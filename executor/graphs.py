"""CUDA graphs of steps: two for each shape, *forward* and *sample*.

A graph is captured before the engine is ready or, for shapes that only some loads use, when a step
first needs it. A step whose shape has no graph yet is padded to a larger one that has, until such
padding has cost as much as a capture. All graphs share one memory pool: they run one after the
other on one stream, and what a graph leaves behind is used before the next one runs.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from octavo.executor.step_program import StepProgram, StepShape

logger = logging.getLogger(__name__)

Part = Literal["forward", "sample", "sample with edits"]

EAGER_SIZES = (1, 2, 4, 8)
"""Decode steps captured before the engine is ready: the sizes of a few interactive users."""
MIXED_ROWS = (32, 128, 256)
MIXED_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Shapes of steps in which prompts are computed beside rows that decode."""
CAPTURE_ROWS = 2_000
"""Rows of padding that cost as much as a capture: 10 us each against 17 to 29 ms (Qwen3-0.6B on an
H200; 20 us and 20 to 40 ms for 8B). All but 2 ms of these are the launches, as of a step that is
launched singly: so one that has no graph to be padded to is captured at once."""
LAYER_BYTES_PER_US = 700e6
"""Of 16-bit weights that one token is multiplied with: 700 TFLOP/s, seen on an H200."""
LAYER_LAUNCH_US = 400
"""What the host takes at the least to launch the kernels of a layer singly: six of Triton."""


def default_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes worth a graph: padding costs at most 1 row in 8, beyond 8 rows."""
    sizes = [1, 2, 4]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, size // 8 // 8 * 8)
    return (*(size for size in sizes if size < max_rows), max_rows)


def mixed_shapes(max_rows: int, *, max_tokens: int, layer_bytes: int) -> tuple[StepShape, ...]:
    """Return the shapes of steps with prompts, of at most so many rows and tokens, worth a graph.

    They are those that the device computes in less time than the host takes to launch their
    kernels; ``layer_bytes`` are the weights of one layer.
    """
    most_tokens = LAYER_LAUNCH_US * LAYER_BYTES_PER_US / layer_bytes
    reached = MIXED_TOKENS[: bisect_left(MIXED_TOKENS, max_tokens) + 1]
    rows = sorted({min(num_rows, max_rows) for num_rows in MIXED_ROWS})
    return tuple(
        StepShape.padded(num_rows, num_tokens)
        for num_tokens in reached
        for num_rows in rows
        if num_rows < num_tokens <= most_tokens
    )


class StepGraphs:
    """Runs steps padded to one of a few shapes, captured or not."""

    def __init__(
        self,
        shapes: Sequence[StepShape],
        create: Callable[[StepShape], StepProgram],
        *,
        edited: "EditScratch",
    ) -> None:
        ordered = sorted(shapes, key=lambda shape: (shape.num_rows, shape.num_tokens))
        self._decode = [shape for shape in ordered if shape.is_decode]
        self._decode_sizes = [shape.num_rows for shape in self._decode]
        mixed = [shape for shape in shapes if not shape.is_decode]
        self._mixed = sorted(mixed, key=lambda shape: (shape.num_tokens, shape.num_rows))
        self._create = create
        self._edited = edited
        self._runs = {shape: ShapeRuns(shape) for shape in ordered}
        self._num_padded: Counter[StepShape] = Counter()
        """Rows that steps of smaller shapes were padded by to each, since it last was too many."""
        self._pool = torch.cuda.graph_pool_handle() if shapes else None

    @property
    def captured_shapes(self) -> list[StepShape]:
        """The shapes whose forward pass is a graph, those with the fewest rows first."""
        return [shape for shape, runs in self._runs.items() if runs.graphs.get("forward")]

    def find_uncaptured(self) -> StepShape | None:
        """Return the shape with the fewest rows that no step has been captured of."""
        return next(
            (shape for shape, runs in self._runs.items() if "forward" not in runs.graphs), None
        )

    def give_up(self, shape: StepShape) -> None:
        """Launch steps of a shape singly from now on, for there is no memory to capture one."""
        logger.warning("no memory to capture %s", shape, exc_info=True)
        self._runs[shape].graphs["forward"] = None

    def find_shape(self, num_rows: int, num_tokens: int, *, num_sampled: int) -> StepShape | None:
        """Return what a step runs as; None where it is launched singly."""
        if num_rows == num_tokens == num_sampled:
            shape = self.find_decode_shape(num_rows)
        else:
            shape = self.find_mixed_shape(num_rows, num_tokens)
        return None if shape is None else self.choose(shape)

    def find_decode_shape(self, num_rows: int) -> StepShape | None:
        """Return what a step in which all rows compute and sample one token is padded to."""
        index = bisect_left(self._decode_sizes, num_rows)
        return self._decode[index] if index < len(self._decode) else None

    def find_mixed_shape(self, num_rows: int, num_tokens: int) -> StepShape | None:
        """Return what any other step is padded to; None where it is launched singly."""
        fitting = (
            shape
            for shape in self._mixed
            if num_rows <= shape.num_rows and num_tokens <= shape.num_tokens
        )
        return next(fitting, None)

    def choose(self, shape: StepShape) -> StepShape:
        """Return what a step padded to ``shape`` runs as: that, or a larger shape with a graph."""
        graphs = self._runs[shape].graphs
        larger = None if graphs.get("forward") else self._find_captured(shape)
        if larger is None:
            return shape
        if "forward" not in graphs:  # it can be captured
            self._num_padded[larger] += shape.count_padding(larger)
            if self._num_padded[larger] > CAPTURE_ROWS:
                del self._num_padded[larger]
                return shape
        return larger

    def run(self, shape: StepShape, *, has_edits: bool) -> StepProgram:
        """Launch a step whose upload is on its way, captured if it is the first of its shape."""
        runs = self._runs[shape]
        program = runs.program = runs.program or self._create(shape)
        edited = self._edited.take() if has_edits else None
        is_graph = self._launch(runs, "forward", program.forward)
        part: Part = "sample with edits" if has_edits else "sample"
        if is_graph:  # the logits are always in the same place
            self._launch(runs, part, lambda: program.sample(edited))
        else:
            program.sample(edited)
        return program

    def _find_captured(self, shape: StepShape) -> StepShape | None:
        """Return the captured shape of the same kind that pads ``shape`` least."""
        fitting = (
            other
            for other in self.captured_shapes
            if other.is_decode == shape.is_decode
            and other.num_rows >= shape.num_rows
            and other.num_tokens >= shape.num_tokens
        )
        return min(fitting, key=shape.count_padding, default=None)

    def _launch(self, runs: "ShapeRuns", part: Part, launch: Callable[[], None]) -> bool:
        """Launch a part, captured if it has not been; returns whether it was a graph."""
        if part not in runs.graphs:
            runs.graphs[part] = self._capture(runs.shape, part, launch)
        if graph := runs.graphs.get(part):
            graph.replay()
            return True
        launch()
        return False

    def _capture(
        self, shape: StepShape, part: Part, launch: Callable[[], None]
    ) -> torch.cuda.CUDAGraph | None:
        """Return the graph of what ``launch`` launches; None, with a warning, if it fails."""
        started_s = time.perf_counter()
        try:
            graph = self._record(launch)
        except RuntimeError:  # out of memory, or a launch that cannot be captured
            logger.warning(
                "cannot capture %s of %d rows and %d tokens: its kernels are launched singly",
                part,
                shape.num_rows,
                shape.num_tokens,
                exc_info=True,
            )
            return None
        logger.info(
            "captured %s of %d rows and %d tokens in %.2f s",
            part,
            shape.num_rows,
            shape.num_tokens,
            time.perf_counter() - started_s,
        )
        return graph

    def _record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _collecting_no_garbage():
            # Relaxed, so that CUDA may load what a start has not loaded yet.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                launch()
            finally:  # the stream must leave capture mode, whatever launch raised
                graph.capture_end()
        return graph


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Keep Python's collector from freeing pinned memory: torch would record an event for it in the
    stream that is captured, and fail at the next allocation, which asks after the event.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class ShapeRuns:
    """What steps of one shape have left for those that follow."""

    shape: StepShape
    program: StepProgram | None = None
    graphs: dict[Part, torch.cuda.CUDAGraph | None] = field(default_factory=dict)
    """None where capture failed: it is not tried again."""


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
