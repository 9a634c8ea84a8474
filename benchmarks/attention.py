"""Speed of the attention kernels on one GPU, alone: one JSON line a shape.

Random data; a graph of all layers, over so many block tables that nothing is read twice from L2;
the median of its replays divided by its launches. Floors: K/V bytes over the card's copy bandwidth,
operations over its matrix rate.

usage: python benchmarks/attention.py [store plan decode families prefill] [--pool-gb 100]
           [--layout block|layer] [--order token|head] [--group 4] [--layers 36]
           [--kv-cache-dtype fp8]
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer
from octavo.attention.ops.decode import decode
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.plan_decode import plan_decode
from octavo.attention.ops.plan_prefill import plan_prefill
from octavo.attention.ops.prefill import prefill
from octavo.attention.ops.prefill_hopper import prefill_on_hopper
from octavo.attention.ops.store_kv import store_kv
from octavo.attention.triton_backend import PROGRAMS_PER_MULTIPROCESSOR

PrefillKernel = Callable[..., None]
COPY_BYTES_PER_S = 4.3e12
MATRIX_FLOP_PER_S = 790e12
L2_BYTES = 60e6
MAX_POSITIONS = 70_000
DECODES = {
    "1x512": [512],
    "1x8k": [8192],
    "8x1k": [1024] * 8,
    "64x1k": [1024] * 64,
    "64x4k": [4096] * 64,
    "256x1k": [1024] * 256,
    "64k + 63x1k": [65_536] + [1024] * 63,
    "1x32k + 63x100": [32_768] + [100] * 63,
}
FAMILIES = {
    "16 x 32 on 2k": (16, 32, 2000, 150),
    "1 x 32 on 2k": (1, 32, 2000, 150),
    "1 x 64 on 128": (1, 64, 128, 896),
    "4 x 8 on 8k": (4, 8, 8192, 500),
    "32 x 4 on 1k": (32, 4, 1024, 300),
}
"""Families, rows of one, tokens that they have in common and tokens of each row alone."""
PREFILLS = {
    "2k": [(2048, 2048)],
    "8k": [(8192, 8192)],
    "32k": [(32_768, 32_768)],
    "16 x 512": [(512, 512)] * 16,
    "1k on 31k": [(1024, 32_768)],
    "128 x (128 on 2k)": [(128, 2128)] * 128,
}
PREFILL_KERNELS: dict[torch.dtype, tuple[PrefillKernel, ...]] = {
    torch.bfloat16: (prefill, prefill_on_hopper),
    torch.float8_e4m3fn: (prefill,),
}
KV_DTYPES = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}
POOL_DIMS = {
    ("block", "token"): "BLCTHD",
    ("block", "head"): "BLCHTD",
    ("layer", "token"): "LCBTHD",
    ("layer", "head"): "LCBHTD",
}


@dataclass(frozen=True)
class Model:
    """Head shape of the layers; the defaults are Qwen3-8B's."""

    num_layers: int = 36
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    def make_layer(self) -> AttentionLayer:
        """Make a layer with q/k-norm."""
        return AttentionLayer(
            index=0,
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rotary=torch.randn(MAX_POSITIONS, self.head_dim, device="cuda"),
            q_norm=torch.randn(self.head_dim, dtype=self.dtype, device="cuda"),
            k_norm=torch.randn(self.head_dim, dtype=self.dtype, device="cuda"),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize


def make_random(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make small values of any float type; torch draws none of 8 bits."""
    if dtype.itemsize > 1:
        return torch.empty(sizes, dtype=dtype, device="cuda").normal_()
    codes = torch.empty(sizes, dtype=torch.uint8, device="cuda").random_(0, 64)
    return codes.view(dtype)


class Pool:
    """Random K/V of all layers in one of the layouts; its blocks are taken in random order."""

    def __init__(self, model: Model, num_bytes: float, *, dims: str) -> None:
        self.model = model
        self.num_blocks = int(
            num_bytes // (model.token_bytes * model.block_size * model.num_layers)
        )
        sizes = {
            "B": self.num_blocks,
            "L": model.num_layers,
            "C": 2,
            "T": model.block_size,
            "H": model.num_kv_heads,
            "D": model.head_dim,
        }
        pool = make_random([sizes[dim] for dim in dims], model.kv_dtype)
        pool = pool.permute([dims.index(dim) for dim in "LCBTHD"])
        self.caches = [PagedKV(layer[0], layer[1]) for layer in pool]
        self.free = torch.randperm(self.num_blocks, device="cuda").int()

    def make_inputs(self, rows: list[tuple[int, int]]) -> AttentionInputs:
        """Place rows of (tokens of this step, context length) in the next blocks, in a circle."""
        size = self.model.block_size
        counts = [math.ceil(context / size) for _, context in rows]
        assert sum(counts) <= self.num_blocks, (
            f"{sum(counts)} blocks needed, {self.num_blocks} exist"
        )
        tables = torch.zeros(len(rows), max(counts), dtype=torch.int32, device="cuda")
        positions, slots = [], []
        self.free = self.free.roll(-sum(counts))
        taken = 0
        for row, (num_tokens, context) in enumerate(rows):
            tables[row, : counts[row]] = self.free[taken : taken + counts[row]]
            taken += counts[row]
            position = torch.arange(context - num_tokens, context, device="cuda")
            positions.append(position)
            slots.append(tables[row, position // size].long() * size + position % size)
        starts = torch.tensor([0] + [num_tokens for num_tokens, _ in rows]).cumsum(0)
        return AttentionInputs(
            starts.int().cuda(),
            torch.tensor([context for _, context in rows]).int().cuda(),
            tables,
            torch.cat(positions).int(),
            torch.cat(slots),
        )

    def make_rotation(self, rows: list[tuple[int, int]]) -> list[AttentionInputs]:
        """Make as many steps of these rows as it takes to leave L2 behind."""
        read = sum(context for _, context in rows) * self.model.token_bytes * self.model.num_layers
        return [self.make_inputs(rows) for _ in range(math.ceil(4 * L2_BYTES / read))]


def time_graph(launches: Sequence[Callable[[], object]], *, num_replays: int = 15) -> float:
    """Return the median time of one launch in microseconds."""
    launches[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = [_time_once(graph) for _ in range(3 + num_replays)]
    return statistics.median(times[3:]) / len(launches) * 1000


def _time_once(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def create_workspace(model: Model) -> DecodeWorkspace:
    """Allocate what a TritonBackend of this model would."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return DecodeWorkspace.create(
        model.head_dim,
        model.kv_dtype,
        num_programs=count * PROGRAMS_PER_MULTIPROCESSOR,
        device="cuda",
    )


def time_decode(pool: Pool, lengths: list[int]) -> dict[str, float]:
    """Time the attention of rows with one token each, the plan left out."""
    layer, workspace = pool.model.make_layer(), create_workspace(pool.model)
    steps = pool.make_rotation([(1, length) for length in lengths])
    plans = [
        plan_decode(layer, inputs, workspace=workspace, block_size=pool.model.block_size)
        for inputs in steps
    ]
    q, out = make_heads(layer, len(lengths), pool.model.dtype)

    us = time_graph(
        [
            partial(decode, layer, q, cache=cache, plan=plan, out=out)
            for plan in plans
            for cache in pool.caches
        ]
    )
    return {"us": us, "floor_us": sum(lengths) * pool.model.token_bytes / COPY_BYTES_PER_S * 1e6}


def time_families(
    pool: Pool, family: tuple[int, int, int, int], *, shared: bool
) -> dict[str, float]:
    """Time the attention of rows with one token in families, and their plan."""
    num_families, num_members, common, own = family
    layer, workspace = pool.model.make_layer(), create_workspace(pool.model)
    num_rows = num_families * num_members
    inputs = pool.make_inputs([(1, common + own)] * num_rows)
    num_blocks = common // pool.model.block_size
    if shared:  # the rows of a family do not lie side by side
        leaders = torch.arange(num_rows, device="cuda") % num_families
        inputs.block_tables[:, :num_blocks] = inputs.block_tables[leaders, :num_blocks]
    q, out = make_heads(layer, num_rows, pool.model.dtype)
    make_plan = partial(
        plan_decode, layer, inputs, workspace=workspace, block_size=pool.model.block_size
    )

    plan = make_plan()
    us = time_graph(
        [partial(decode, layer, q, cache=cache, plan=plan, out=out) for cache in pool.caches]
    )
    read = num_families * (common if shared else num_members * common) + num_rows * own
    return {
        "us": us,
        "floor_us": read * pool.model.token_bytes / COPY_BYTES_PER_S * 1e6,
        "plan_us": time_graph([make_plan] * 50),
    }


def time_prefill(
    pool: Pool, rows: list[tuple[int, int]], *, kernel: PrefillKernel = prefill
) -> dict[str, float]:
    """Time the attention of chunks, the plan left out."""
    layer, inputs = pool.model.make_layer(), pool.make_inputs(rows)
    plan = plan_prefill(layer, inputs, dtype=pool.model.dtype)
    q, out = make_heads(layer, sum(num_tokens for num_tokens, _ in rows), pool.model.dtype)

    launches = [
        partial(kernel, layer, q, cache=cache, plan=plan, out=out) for cache in pool.caches[:4]
    ]
    us = time_graph(launches, num_replays=5)
    seen = sum(n * context - n * (n - 1) / 2 for n, context in rows)
    flop = 4 * layer.num_heads * layer.head_dim * seen
    return {"us": us, "floor_us": flop / MATRIX_FLOP_PER_S * 1e6, "tflops": flop / us / 1e6}


def time_store(pool: Pool, num_tokens: int) -> dict[str, float]:
    """Time norm, rotation and store."""
    layer, inputs = pool.model.make_layer(), pool.make_inputs([(num_tokens, num_tokens)])
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    qkv = torch.randn(num_tokens, width, dtype=pool.model.dtype, device="cuda")

    launches = [partial(store_kv, layer, qkv, inputs=inputs, cache=cache) for cache in pool.caches]
    us = time_graph(launches)
    q_bytes = num_tokens * layer.num_heads * layer.head_dim * qkv.itemsize
    num_bytes = qkv.nbytes + q_bytes + num_tokens * pool.model.token_bytes
    return {"us": us, "floor_us": num_bytes / COPY_BYTES_PER_S * 1e6}


def time_plans(pool: Pool, num_rows: int) -> dict[str, float]:
    """Time both plans of one step."""
    layer, workspace = pool.model.make_layer(), create_workspace(pool.model)
    inputs = pool.make_inputs([(1, 100)] * (num_rows - 1) + [(100, 100)])

    def launch() -> None:
        plan_decode(layer, inputs, workspace=workspace, block_size=pool.model.block_size)
        plan_prefill(layer, inputs, dtype=pool.model.dtype)

    return {"us": time_graph([launch] * 50)}


def make_heads(layer: AttentionLayer, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make random queries and room for outputs."""
    shape = (num_tokens, layer.num_heads, layer.head_dim)
    q = torch.randn(shape, dtype=dtype, device="cuda")
    return q, torch.empty_like(q)


def run_store(pool: Pool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield kernel, shape and times of norm, rotation and store."""
    for num_tokens in (1, 64, 8192):
        yield "store_kv", str(num_tokens), time_store(pool, num_tokens)


def run_plan(pool: Pool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield those of both plans of a step."""
    for num_rows in (1, 64, 256, 1024):
        yield "plans", str(num_rows), time_plans(pool, num_rows)


def run_decode(pool: Pool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield those of rows with one token."""
    for shape, lengths in DECODES.items():
        yield "decode", shape, time_decode(pool, lengths)


def run_families(pool: Pool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield those of rows with common leading blocks, as such and as if each had its own."""
    for shape, family in FAMILIES.items():
        yield "decode, apart", shape, time_families(pool, family, shared=False)
        yield "decode, shared", shape, time_families(pool, family, shared=True)


def run_prefill(pool: Pool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield those of chunks, with both kernels."""
    for shape, rows in PREFILLS.items():
        for kernel in PREFILL_KERNELS[pool.model.kv_dtype]:
            yield kernel.__name__, shape, time_prefill(pool, rows, kernel=kernel)


RUNS = {
    "store": run_store,
    "plan": run_plan,
    "decode": run_decode,
    "families": run_families,
    "prefill": run_prefill,
}


def main() -> None:
    """Time the kernels named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", default=["store", "plan", "decode", "prefill"])
    parser.add_argument("--pool-gb", type=float, default=100)
    parser.add_argument("--layout", choices=["block", "layer"], default="block")
    parser.add_argument("--order", choices=["token", "head"], default="token")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--layers", type=int, default=36, help="16 for families of 512 rows")
    parser.add_argument("--kv-cache-dtype", choices=list(KV_DTYPES), default="auto")
    arguments = parser.parse_args()
    model = Model(
        group=arguments.group,
        num_layers=arguments.layers,
        kv_dtype=KV_DTYPES[arguments.kv_cache_dtype],
    )
    dims = POOL_DIMS[arguments.layout, arguments.order]
    pool = Pool(model, arguments.pool_gb * 1e9, dims=dims)
    settings = {"device": torch.cuda.get_device_name(), "pool": dims, "group": model.group}
    settings["kv_cache_dtype"] = arguments.kv_cache_dtype
    runs = (RUNS[kernel](pool) for kernel in arguments.kernels)
    for kernel, shape, times in itertools.chain.from_iterable(runs):
        if "floor_us" in times:
            times["percent_of_floor"] = 100 * times["floor_us"] / times["us"]
        times = {name: round(value, 2) for name, value in times.items()}
        print(json.dumps({**settings, "kernel": kernel, "shape": shape, **times}), flush=True)


if __name__ == "__main__":
    main()
