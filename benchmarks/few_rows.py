"""Tiles of products with few rows, timed where they run: in the graph of a whole network.

Random weights; rows have ``--context`` tokens, or between two numbers of them (``200-1400``), the
same ones for the same number of rows; one graph of all layers and the head, the median of its
replays. Prints one JSON line for plain kernels (cuBLAS, with norm, activation and sum beside it),
one for the folded ones with the tiles that the rules choose, one for each matrix with nothing
folded into its product alone, and one for each: the tiles tried in its place, best first, and what
the step took with each. The best of a matrix stays while the next one is tried.

usage: python benchmarks/few_rows.py [qwen3-0.6b qwen3-8b] [--rows 1 2 8 16 32 64]
           [--context 1100 200-1400] [--quantization fp8] [--no-tiles]
"""

import argparse
import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from gemv import time_replay
from torch import Tensor

from octavo.attention.backend import AttentionInputs
from octavo.attention.triton_backend import TritonBackend
from octavo.models.causal_lm import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.layers import matrix
from octavo.models.layers.parallel import Shard
from octavo.models.ops import gemv, hopper_tiles, linear, linear_hopper
from octavo.models.ops.norm import Normed, Product
from octavo.models.quantization import ONLINE
from octavo.models.qwen3 import build_qwen3
from octavo.models.rope import RopeConfig

BLOCK_SIZE = 16
NUM_REPLAYS = 10
SIZES = {  # hidden, intermediate, layers, heads
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-8b": (4096, 12288, 36, 32),
}
Key = tuple[int, ...]
"""The shape of a matrix: features and inputs."""


def build(name: str, quantization: str | None) -> CausalLM:
    """Build a network of this shape on the GPU, with random weights."""
    hidden, intermediate, num_layers, num_heads = SIZES[name]
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        sliding_windows=(None,) * num_layers,
        dtype="bfloat16",
        quantization=ONLINE if quantization else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = build_qwen3(config, Shard())
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1, 0.1)
        elif parameter.itemsize > 1:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)
        else:  # of scales near 1, which makes large sums and no difference
            for start in range(0, len(parameter), 8192):
                rows = parameter.data[start : start + 8192]
                rows.copy_(torch.randn(rows.shape, device="cuda"))
    return model


class Step:
    """A decode step of some rows: what a graph captures."""

    def __init__(self, model: CausalLM, lengths: Sequence[int]) -> None:
        contexts = torch.tensor(lengths, dtype=torch.int32)
        num_rows, num_blocks = len(lengths), -(-max(lengths) // BLOCK_SIZE)
        spec = model.kv_cache_spec(BLOCK_SIZE)
        backend = TritonBackend(spec, num_rows * num_blocks, dtype=torch.bfloat16)
        backend.kv_pool.normal_()
        tables = torch.randperm(num_rows * num_blocks).int().view(num_rows, num_blocks)
        positions = contexts - 1
        blocks = tables.gather(1, positions[:, None].long() // BLOCK_SIZE).flatten()
        self._inputs = AttentionInputs(
            query_start=torch.arange(num_rows + 1, dtype=torch.int32, device="cuda"),
            context_lengths=contexts.cuda(),
            block_tables=tables.cuda(),
            positions=positions.cuda(),
            slot_mapping=(blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE).cuda(),
        )
        self._ids = torch.randint(0, model.config.vocab_size, (num_rows,), device="cuda")
        self._model = model
        self._backend = backend

    def run(self) -> Tensor:
        """Launch all kernels of the step; return the logits."""
        with torch.inference_mode():
            hidden = self._model(self._ids, self._backend.bind(self._inputs))
            return self._model.compute_logits(hidden)

    def time_us(self) -> float:
        """Return the median time of the step's graph."""
        self.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        times = [time_replay(graph) for _ in range(2 + NUM_REPLAYS)]
        return 1000 * statistics.median(times[2:])


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Let nothing be folded and torch multiply, except with one row."""

    def find_gemv(x: Tensor, weight: Tensor) -> Callable[..., Any] | None:
        return gemv.gemv if len(x) == 1 else None

    with patch.object(linear, "find_kernel", find_gemv), unfolded(None):
        yield


@contextmanager
def unfolded(key: Key | None) -> Iterator[None]:
    """Fold nothing into products with matrices of this shape; None is any."""
    silu_mul, add_norm = linear.linear_silu_mul, linear.linear_add_norm

    def plain_silu_mul(x: Any, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        if key in (None, tuple(weight.shape)):
            return linear.gate(linear.linear(x, weight, *args, **options))
        return silu_mul(x, weight, *args, **options)

    def plain_add_norm(
        x: Any, weight: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor | Normed, Tensor] | None:
        if key in (None, tuple(weight.shape)):
            return None
        return add_norm(x, weight, *args, **options)

    with (
        patch.object(matrix, "linear_silu_mul", plain_silu_mul),
        patch.object(matrix, "linear_add_norm", plain_add_norm),
    ):
        yield


class Tiles:
    """Tiles in place of those that the rules choose, by matrix."""

    def __init__(self) -> None:
        self._tiles: dict[Key, tuple[int, ...]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the kernels take them."""
        one, several = gemv.gemv, linear_hopper.multiply_on_hopper

        def multiply_one(x: Any, weight: Tensor, *args: Any, **options: Any) -> Product:
            tile = self._tiles.get(tuple(weight.shape))
            return one(x, weight, *args, **options, tile=gemv.Tile(*tile) if tile else None)

        def multiply_several(x: Any, weight: Tensor, *args: Any, **options: Any) -> Product:
            tile = self._tiles.get(tuple(weight.shape))
            return several(
                x, weight, *args, **options, tile=hopper_tiles.Tile(*tile) if tile else None
            )

        with (
            patch.object(linear, "gemv", multiply_one),
            patch.object(linear, "multiply_on_hopper", multiply_several),
        ):
            yield

    def tune(self, key: Key, tiles: Sequence[tuple[int, ...]], step: Step) -> list[list[float]]:
        """Keep the fastest for a matrix; return the step's times, each in front of its tile."""
        times: dict[tuple[int, ...], float] = {}
        for tile in tiles:
            self._tiles[key] = tile
            times[tile] = step.time_us()
        self._tiles[key] = min(times, key=times.__getitem__)
        ordered = sorted(times.items(), key=lambda item: item[1])
        return [[round(us, 1), *tile] for tile, us in ordered]


def list_gemv_tiles(num_inputs: int, *, is_gated: bool, is_wide: bool) -> list[tuple[int, ...]]:
    """List tiles of a product with one row: few weights a thread, no masks."""
    elements = (8, 16, 32) if is_wide else (32, 64, 128)
    return [
        (rows, columns, num_warps)
        for num_warps in (1, 2, 4, 8)
        for rows in (1, 2, 4, 8)[is_gated:]
        for columns in (512, 1024, 2048, 4096)
        if rows * columns // (32 * num_warps) in elements and num_inputs % columns == 0
    ]


def list_hopper_tiles(num_features: int, num_rows: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles of a product with several rows: between 60 programs and one a place."""
    for num_consumers in (1, 2, 3):
        for num_parts in (1, 2, 4, 8):
            for num_neighbours in (1, 2, 3, 4) if num_consumers == 1 else (1,):
                tile = hopper_tiles.Tile(num_consumers, num_parts, num_neighbours)
                num_programs = tile.count_programs(num_features)
                places = hopper_tiles.NUM_MULTIPROCESSORS * num_neighbours
                runs_at_once = num_parts == 1 or num_programs <= places
                if num_programs >= 60 and runs_at_once and tile.count_stages(num_rows) >= 3:
                    yield tuple(tile)


def run(
    name: str,
    row_counts: Sequence[int],
    *,
    quantization: str | None,
    context: str,
    with_tiles: bool,
) -> None:
    """Measure one model with rows of one kind of context."""
    model = build(name, quantization)
    hidden, intermediate, _, num_heads = SIZES[name]
    keys = {
        "qkv": ((num_heads + 16) * 128, hidden),
        "o": (hidden, num_heads * 128),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
        "head": (model.config.vocab_size, hidden),
    }
    for num_rows in row_counts:
        step = Step(model, draw_lengths(num_rows, context))
        line = {
            "benchmark": "few_rows",
            "commit": find_commit(),
            "model": name,
            "quantization": quantization,
            "rows": num_rows,
            "context": context,
        }
        with plain_kernels():
            report(line, plain_us=round(step.time_us(), 1))
        report(line, folded_us=round(step.time_us(), 1))
        for layer in ("o", "gate_up", "down"):
            with unfolded(keys[layer]):
                report(line, layer=layer, unfolded_us=round(step.time_us(), 1))
        tiles = Tiles()
        for layer, key in keys.items() if with_tiles else ():
            if num_rows == 1:
                is_gated = layer == "gate_up"
                candidates = list_gemv_tiles(key[1], is_gated=is_gated, is_wide=not quantization)
            else:
                candidates = list(list_hopper_tiles(key[0], num_rows))
            with tiles.used():
                times = tiles.tune(key, candidates, step)
            report(line, layer=layer, tiles=times)


def draw_lengths(num_rows: int, context: str) -> list[int]:
    """Return the context of each row: all the same, or between two numbers."""
    least, _, most = context.partition("-")
    generator = random.Random(1)
    return [generator.randint(int(least), int(most or least)) for _ in range(num_rows)]


def find_commit() -> str:
    """Return the short name of the commit that runs."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def report(line: dict[str, Any], **result: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(line | result), flush=True)


def main() -> None:
    """Measure the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 32, 64])
    parser.add_argument("--context", nargs="+", default=["1100"])
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--no-tiles", action="store_true", help="do not try other tiles")
    arguments = parser.parse_args()
    for name, context in product(arguments.models, arguments.context):
        run(
            name,
            arguments.rows,
            quantization=arguments.quantization,
            context=context,
            with_tiles=not arguments.no_tiles,
        )


if __name__ == "__main__":
    main()
