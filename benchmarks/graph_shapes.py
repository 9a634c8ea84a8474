"""Which steps of a workload run as graphs: captures, single launches and rows of padding.

Requests that arrive at once go through the engine's scheduler; its steps choose their shapes as on
a device. Prints one JSON line a run: the second finds what the first has captured.

usage: python benchmarks/graph_shapes.py [--requests 256] [--prompt 100-1024] [--output 100-1024]
           [--max-num-seqs 1024] [--layer-mb 31] [--runs 2] [--idle]
"""

import argparse
import json
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from simulation import Arrival, Simulation

from octavo.config import SchedulerConfig
from octavo.executor.graphs import EAGER_SIZES, EditScratch, StepGraphs, default_sizes, mixed_shapes
from octavo.executor.step import Step
from octavo.executor.step_program import StepShape

MAX_STEP_TOKENS = 16_384


class EmptyGraph:
    """A graph without a device."""

    def capture_begin(self, **options: Any) -> None:
        """Record nothing."""

    def capture_end(self) -> None:
        """Record nothing."""

    def replay(self) -> None:
        """Launch nothing."""


class CountedGraphs:
    """The graphs of an engine on a device that does nothing, and what its steps cost."""

    def __init__(self, max_rows: int, layer_bytes: int, *, is_idle: bool) -> None:
        nothing: Any = SimpleNamespace(forward=lambda: None, sample=lambda edited: None)
        shapes = [StepShape.padded(size, size) for size in default_sizes(max_rows)]
        shapes += mixed_shapes(max_rows, max_tokens=MAX_STEP_TOKENS, layer_bytes=layer_bytes)
        edited = EditScratch(max_rows, 1, torch.device("cpu"))
        self._graphs = StepGraphs(shapes, lambda shape: nothing, edited=edited)
        for shape in shapes:
            if is_idle or (shape.is_decode and shape.num_rows in EAGER_SIZES):
                self._graphs.run(shape, has_edits=False)
        self.num_single = self.num_padded = 0

    @property
    def num_captured(self) -> int:
        """Shapes with a graph."""
        return len(self._graphs.captured_shapes)

    def run(self, step: Step) -> None:
        """Count one step."""
        num_rows, num_tokens = len(step.rows), int(step.num_tokens.sum())
        shape = self._graphs.find_shape(num_rows, num_tokens, num_sampled=step.num_sampled)
        if shape is None:
            self.num_single += 1
        else:
            self._graphs.run(shape, has_edits=False)
            self.num_padded += max(shape.num_rows - num_rows, shape.num_tokens - num_tokens)


def main() -> None:
    """Simulate the runs, one behind the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", default="100-1024")
    parser.add_argument("--output", default="100-1024")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--layer-mb", type=float, default=31)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--idle", action="store_true", help="all shapes have been captured before")
    arguments = parser.parse_args()
    with (
        patch.object(torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        patch.object(torch.cuda, "CUDAGraph", EmptyGraph),
    ):
        run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    """Print what each run adds to the graphs."""
    max_rows, layer_bytes = arguments.max_num_seqs, int(arguments.layer_mb * 1e6)
    graphs = CountedGraphs(max_rows, layer_bytes, is_idle=arguments.idle)
    for run in range(arguments.runs):
        before = graphs.num_captured, graphs.num_single, graphs.num_padded
        num_steps = simulate(graphs, arguments, seed=run)
        captured, single, padded = (
            now - then
            for now, then in zip(
                (graphs.num_captured, graphs.num_single, graphs.num_padded), before, strict=True
            )
        )
        line = {"steps": num_steps, "captured": captured, "single": single, "padded_rows": padded}
        print(json.dumps({"benchmark": "graph_shapes", "run": run} | line), flush=True)


def simulate(graphs: CountedGraphs, arguments: argparse.Namespace, *, seed: int) -> int:
    """Run the workload through a scheduler; return the number of its steps."""
    draw = random.Random(seed)

    def pick(bounds: str) -> int:
        least, _, most = bounds.partition("-")
        return draw.randint(int(least), int(most or least))

    config = SchedulerConfig(
        num_blocks=2**16,
        block_size=16,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_model_len=36_000,
    )
    simulation = Simulation(config)
    plan = simulation.scheduler.plan

    def counted(now_s: float) -> Step | None:
        if step := plan(now_s):
            graphs.run(step)
        return step

    with patch.object(simulation.scheduler, "plan", counted):
        simulation.run(
            Arrival([draw.randrange(40_000) for _ in range(pick(arguments.prompt))], output)
            for output in [pick(arguments.output) for _ in range(arguments.requests)]
        )
    return simulation.num_steps


if __name__ == "__main__":
    main()
