"""Speed of linear layers with a few rows on one GPU, alone: one JSON line a shape and kernel.

Random data, the weight in bfloat16 or in 8 bits; a graph of products with so many weights that
nothing is read twice from L2; the median of its replays divided by its products. The floor is the
weight's bytes over the card's copy bandwidth. ``--tiles`` tries other tiles of one row.

usage: python benchmarks/gemv.py [qwen3-0.6b qwen3-8b] [--layers lm_head] [--rows 1]
           [--weights bfloat16 | fp8 | int8] [--tiles]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.eight_bits import FP8, INT8
from octavo.models.ops.gemv import Tile, gemv
from octavo.models.ops.linear import linear
from octavo.models.ops.scaled_linear import multiply_scaled

COPY_BYTES_PER_S = 4.3e12
L2_BYTES = 60e6
NUM_REPLAYS = 15
SHAPES = {
    "qwen3-0.6b": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "lm_head": (151936, 1024),
    },
    "qwen3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
        "lm_head": (151936, 4096),
    },
}
TYPES = {"bfloat16": torch.bfloat16, "fp8": FP8, "int8": INT8}
ELEMENTS = (16, 32, 64)
"""Weights that a thread holds at a time: two to eight loads of 16 bytes."""


def list_tiles(num_inputs: int) -> Iterator[Tile]:
    """Yield the tiles worth a measurement; they cut the inputs without a rest."""
    for num_warps in (1, 2, 4, 8):
        for rows in (1, 2, 4, 8, 16):
            for columns in (256, 512, 1024, 2048, 4096):
                elements = rows * columns // (32 * num_warps)
                if elements in ELEMENTS and num_inputs % columns == 0:
                    yield Tile(rows, columns, num_warps)


def time_products(
    weights: Tensor, multiply: Callable[[Tensor, Tensor], object], *, num_rows: int
) -> float:
    """Return the median time in microseconds of one of the products with all weights."""
    x = torch.randn(num_rows, weights.shape[2], dtype=torch.bfloat16, device=weights.device)
    multiply(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            multiply(x, weight)
    times = [time_replay(graph) for _ in range(3 + NUM_REPLAYS)]
    return statistics.median(times[3:]) / len(weights) * 1000


def time_replay(graph: torch.cuda.CUDAGraph) -> float:
    """Return the milliseconds of one replay."""
    start, stop = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def run_shape(
    shape: tuple[int, int], dtype: torch.dtype, *, num_rows: int, with_tiles: bool
) -> Iterator[tuple[str, float]]:
    """Yield the times of torch's product, of ours, and of ours with other tiles."""
    count = math.ceil(4 * L2_BYTES / (dtype.itemsize * math.prod(shape)))
    weights = torch.empty((count, *shape), dtype=torch.bfloat16, device="cuda").normal_()
    time_us = partial(time_products, num_rows=num_rows)
    yield "torch, bfloat16", time_us(weights, functional.linear)
    scale = None
    if dtype != torch.bfloat16:
        weights, scale = weights.to(dtype), torch.ones(shape[0], device="cuda")
    if scale is not None and dtype == FP8:
        yield "torch, 8-bit", time_us(weights, partial(multiply_scaled, scale=scale))
    yield "octavo", time_us(weights, partial(linear, scale=scale))
    if with_tiles:
        for tile in list_tiles(shape[1]):
            name = f"gemv, {tile.rows} x {tile.columns}, {tile.num_warps} warps"
            yield name, time_us(weights, partial(gemv, scale=scale, tile=tile))


def main() -> None:
    """Time the layers of the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--layers", nargs="+", default=["qkv", "o", "gate_up", "down", "lm_head"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--weights", choices=TYPES, default="bfloat16")
    parser.add_argument("--tiles", action="store_true", help="time other tiles of one row, too")
    arguments = parser.parse_args()
    dtype = TYPES[arguments.weights]
    for model, layer, num_rows in product(arguments.models, arguments.layers, arguments.rows):
        shape = SHAPES[model][layer]
        floor_us = round(dtype.itemsize * math.prod(shape) / COPY_BYTES_PER_S * 1e6, 2)
        line = {"model": model, "layer": layer, "rows": num_rows, "weights": arguments.weights}
        with_tiles = arguments.tiles and num_rows == 1
        for kernel, us in run_shape(shape, dtype, num_rows=num_rows, with_tiles=with_tiles):
            result = {"kernel": kernel, "us": round(us, 2), "floor_us": floor_us}
            print(json.dumps(line | result), flush=True)


if __name__ == "__main__":
    main()
