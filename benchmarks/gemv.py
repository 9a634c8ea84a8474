"""Speed of linear layers with one row on one GPU, alone: one JSON line a shape and kernel.

Random data, the weight in bfloat16 or, with ``--fp8``, in 8-bit floats; a graph of products with so
many weights that nothing is read twice from L2; the median of its replays divided by its products.
The floor is the weight's bytes over the card's copy bandwidth.

usage: python benchmarks/gemv.py [qwen3-0.6b qwen3-8b] [--tiles] [--fp8]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.ops.fp8 import FP8
from octavo.models.ops.fp8_linear import multiply_scaled
from octavo.models.ops.gemv import Tile, gemv

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


def time_products(weights: Tensor, product: Callable[[Tensor, Tensor], object]) -> float:
    """Return the median time in microseconds of one of the products with all weights."""
    x = torch.randn(1, weights.shape[2], dtype=torch.bfloat16, device=weights.device)
    product(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
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
    shape: tuple[int, int], dtype: torch.dtype, *, with_tiles: bool
) -> Iterator[tuple[str, float]]:
    """Yield the times of torch's product, of the kernel's, and of the kernel with other tiles."""
    count = math.ceil(4 * L2_BYTES / (dtype.itemsize * math.prod(shape)))
    weights = torch.empty((count, *shape), dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
    scale = None
    if dtype == FP8:
        scale = torch.ones(shape[0], device="cuda")
        yield "torch, 8-bit", time_products(weights, partial(multiply_scaled, scale=scale))
    else:
        yield "torch", time_products(weights, functional.linear)
    yield "gemv", time_products(weights, partial(gemv, scale=scale))
    if with_tiles:
        for tile in list_tiles(shape[1]):
            name = f"gemv, {tile.rows} x {tile.columns}, {tile.num_warps} warps"
            yield name, time_products(weights, partial(gemv, scale=scale, tile=tile))


def main() -> None:
    """Time the layers of the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--tiles", action="store_true", help="time other tiles, too")
    parser.add_argument("--fp8", action="store_true", help="8-bit weights")
    arguments = parser.parse_args()
    dtype = FP8 if arguments.fp8 else torch.bfloat16
    for model in arguments.models:
        for layer, shape in SHAPES[model].items():
            floor_us = round(dtype.itemsize * math.prod(shape) / COPY_BYTES_PER_S * 1e6, 2)
            for kernel, us in run_shape(shape, dtype, with_tiles=arguments.tiles):
                line = {"model": model, "layer": layer, "kernel": kernel, "us": round(us, 2)}
                print(json.dumps({**line, "floor_us": floor_us}), flush=True)


if __name__ == "__main__":
    main()
