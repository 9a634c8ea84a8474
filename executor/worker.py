"""Brings up one device: loads the model, sizes the KV pool, builds the runner.

On a CPU, torch's own threads compute: one per core, or OMP_NUM_THREADS, no more than control groups
allow, and one alone where more do not gain. Where other processes want the cores too,
OMP_WAIT_POLICY=passive must be in the environment before torch is imported: threads that spin make
a step many times slower.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from octavo.attention.backend import AttentionBackend, KVCacheSpec
from octavo.attention.cpu_backend import CpuBackend
from octavo.attention.reference import ReferenceBackend
from octavo.attention.triton_backend import TritonBackend
from octavo.attention.xformers_backend import XformersBackend, check_support
from octavo.config import DEVICE_DEFAULTS, EngineConfig
from octavo.errors import ConfigError
from octavo.executor.compile_ahead import StartCompiler
from octavo.executor.compiled_ops import CompiledOps
from octavo.executor.device_memory import GIB, MemoryUse, find_graph_bytes
from octavo.executor.device_runner import DeviceRunner
from octavo.executor.graphs import default_sizes, mixed_shapes
from octavo.executor.kv_pool import PoolDemand, find_cpu_budget, size_pool
from octavo.executor.machine_limits import find_core_limit, find_free_memory
from octavo.executor.model_runner import ModelRunner
from octavo.executor.model_settings import (
    find_integers,
    find_model_config,
    resolve_backend,
    resolve_device,
    resolve_max_model_len,
)
from octavo.executor.op_list import can_compile
from octavo.executor.step import ExecutorInfo
from octavo.executor.step_program import StepShape
from octavo.models.causal_lm import CausalLM
from octavo.models.fingerprint import cache_namespace
from octavo.models.flat import FlatNetwork
from octavo.models.loader import load_model, resolve_dtype
from octavo.models.rounded_copy import load_rounded
from octavo.models.source import ModelSource

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[..., AttentionBackend]] = {
    "triton": TritonBackend,
    "xformers": XformersBackend,
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}
BLOCK_SIZE = 16
XFORMERS_BLOCK_SIZE = 64
NUM_PROFILED_BLOCKS = 16
"""Blocks of the pool that the largest step is measured with; its rows write none."""


def create_runner(
    config: EngineConfig, source: ModelSource, compiler: StartCompiler | None = None
) -> ModelRunner | DeviceRunner:
    """Load the model that ``source`` names and give it a KV pool and rows.

    A GPU needs a compiler, made before the device is used.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelLoadError: the checkpoint cannot be loaded.
    """
    device = resolve_device(config)
    if device.type == "cpu":
        if (num_cores := find_core_limit()) is not None:
            torch.set_num_threads(min(torch.get_num_threads(), num_cores))
        return _create_cpu_runner(*load_parts(config, source, device))
    assert compiler is not None, "nothing compiles the kernels"
    free_at_start = torch.cuda.mem_get_info(device)[0]
    parts, demand = load_parts(config, source, device)
    return _create_device_runner(parts, demand, free_at_start, compiler)


def load_parts(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> tuple["RunnerParts", PoolDemand]:
    """Load the model; returns it with what else a runner needs, and what its pool is sized by."""
    attention_backend = resolve_backend(config, device)
    is_xformers = attention_backend == "xformers"
    block_size = config.block_size or (XFORMERS_BLOCK_SIZE if is_xformers else BLOCK_SIZE)
    model_config = find_model_config(config, source, device)
    max_model_len = resolve_max_model_len(config, model_config)
    dtype = resolve_dtype(config.dtype, model_config, device)
    integers = find_integers(config, source, device)
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
    if integers == "int4" and kv_dtype == torch.float32:
        kv_dtype = torch.bfloat16  # the type of its products
    if is_xformers:
        check_support(
            head_dim=model_config.head_dim,
            block_size=block_size,
            dtype=kv_dtype,
            windows=model_config.sliding_windows,
        )
    with _logged("loaded the weights"):
        limit = find_free_memory() if device.type == "cpu" else None
        if integers is None:
            model = load_model(source, model_config, dtype=dtype, device=device, memory_limit=limit)
        else:
            model = load_rounded(source, model_config, integers, memory_limit=limit)
        model.pack()
    spec = model.kv_cache_spec(block_size)
    demand = PoolDemand(
        max_num_seqs=config.max_num_seqs or DEVICE_DEFAULTS[device.type]["max_num_seqs"],
        max_model_len=max_model_len,
        block_size=block_size,
        block_bytes=spec.num_block_elements() * kv_dtype.itemsize,
    )
    info = ExecutorInfo(
        num_blocks=NUM_PROFILED_BLOCKS,
        block_size=block_size,
        num_rows=demand.max_num_seqs,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        cache_namespace=cache_namespace(
            source,
            model_config,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=block_size,
            tensor_parallel_size=config.tensor_parallel_size,
            integers=integers,
        ),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=attention_backend,
        quantization=integers or config.quantization,
    )
    return RunnerParts(config, model, spec, kv_dtype, device, info, source.cache_dir), demand


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of, before the pool has its size."""

    config: EngineConfig
    model: CausalLM
    spec: KVCacheSpec
    kv_dtype: torch.dtype
    device: torch.device
    info: ExecutorInfo
    cache_dir: Path | None

    def create_backend(self, num_blocks: int) -> AttentionBackend:
        """Return the backend that the settings ask for, with its pool."""
        create = BACKENDS[self.info.attention_backend]
        return create(self.spec, num_blocks, dtype=self.kv_dtype, device=self.device)

    def sized(self, num_blocks: int) -> ExecutorInfo:
        """Return the executor's description with the pool's size."""
        return replace(self.info, num_blocks=num_blocks)


def _create_cpu_runner(parts: RunnerParts, demand: PoolDemand) -> ModelRunner:
    config, info = parts.config, parts.info
    free = find_free_memory()
    num_blocks = size_pool(config, demand, budget_bytes=find_cpu_budget(free))
    if num_blocks * demand.block_bytes > free:
        raise refuse_pool(config, num_blocks, demand.block_bytes, place="in main memory")
    logger.info("KV pool: %d blocks of %d bytes", num_blocks, demand.block_bytes)
    try:
        backend = parts.create_backend(num_blocks)
        network = FlatNetwork(parts.model)
        compiled = _create_compiled_ops(parts, network, backend)
        if compiled is not None:
            compiled.compile()
        return ModelRunner(
            network,
            backend,
            parts.sized(num_blocks),
            before_step=compiled.poll if compiled is not None else None,
        )
    except MemoryError as error:
        raise ConfigError(
            f"the state of {info.num_rows} requests of {info.max_model_len} tokens does not fit in"
            " main memory: lower max_num_seqs or max_model_len"
        ) from error


def _create_compiled_ops(
    parts: RunnerParts, network: FlatNetwork, backend: AttentionBackend
) -> CompiledOps | None:
    """Load what is compiled of the network's small operations; None where nothing is to be."""
    if parts.cache_dir is None or parts.config.enforce_eager or not can_compile(network):
        return None
    if not isinstance(backend, CpuBackend):
        return None
    compiled = CompiledOps(network, backend, parts.cache_dir / "compiled")
    compiled.load()
    return compiled


def _create_device_runner(
    parts: RunnerParts, demand: PoolDemand, free_at_start: int, compiler: StartCompiler
) -> DeviceRunner:
    """Measure the largest step with a small pool, then give the rest of the memory to K/V."""
    config, device = parts.config, parts.device
    weights = torch.cuda.memory_reserved(device)
    layer_bytes = weights // parts.spec.num_layers
    shapes = choose_graph_shapes(config, demand.max_num_seqs, layer_bytes=layer_bytes)
    create = partial(DeviceRunner, parts.model, device=device, graph_shapes=shapes)
    try:
        profiled = create(parts.create_backend(NUM_PROFILED_BLOCKS), parts.info)
        assert config.max_num_batched_tokens is not None, "the settings are not resolved"
        with _logged("compiled the kernels"):
            profiled.compile(compiler, num_tokens=config.max_num_batched_tokens)
        torch.cuda.reset_peak_memory_stats(device)
        with _logged("measured the largest step"):
            profiled.profile(num_tokens=config.max_num_batched_tokens)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights take {weights / GIB:.2f} GiB and the largest step does not fit beside "
            f"them: lower max_num_batched_tokens or max_num_seqs ({error})"
        ) from error
    use = MemoryUse.measure(
        device,
        free_at_start=free_at_start,
        weights=weights,
        graphs=find_graph_bytes(shapes, parts.info.vocab_size),
    )
    del profiled
    torch.cuda.empty_cache()
    logger.info("memory in bytes: %s", use)
    budget = use.find_pool_bytes(config.gpu_memory_utilization)
    num_blocks = size_pool(config, demand, budget_bytes=budget)
    logger.info("KV pool: %d blocks of %d bytes", num_blocks, demand.block_bytes)
    try:
        runner = create(parts.create_backend(num_blocks), parts.sized(num_blocks))
        with _logged("captured the graphs of a few users"):
            runner.warm_up()
    except torch.cuda.OutOfMemoryError as error:
        raise refuse_pool(
            config,
            num_blocks,
            demand.block_bytes,
            place="on the card beside the weights and a step",
        ) from error
    return runner


def refuse_pool(
    config: EngineConfig, num_blocks: int, block_bytes: int, *, place: str
) -> ConfigError:
    """Return the error of a pool that does not fit: it names the setting that made its size."""
    setting = "gpu_memory_utilization"
    if config.num_gpu_blocks_override is not None:
        setting = "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        setting = "kv_cache_memory_bytes"
    return ConfigError(
        f"a KV pool of {num_blocks} blocks of {block_bytes} bytes "
        f"({num_blocks * block_bytes / GIB:.2f} GiB) does not fit {place}: lower {setting}"
    )


def choose_graph_shapes(
    config: EngineConfig, max_num_seqs: int, *, layer_bytes: int
) -> tuple[StepShape, ...]:
    """Return the shapes of steps that get a graph; sizes that no step reaches are named."""
    if config.enforce_eager:
        return ()
    sizes = config.cuda_graph_sizes or default_sizes(max_num_seqs)
    if dropped := sorted({size for size in sizes if size > max_num_seqs}):
        logger.warning(
            "cuda_graph_sizes %s are above max_num_seqs %d: no step needs them",
            dropped,
            max_num_seqs,
        )
    sizes = sorted({size for size in sizes if size <= max_num_seqs})
    decode = tuple(StepShape.padded(size, size) for size in sizes)
    if config.cuda_graph_sizes:
        return decode
    assert config.max_num_batched_tokens is not None, "the settings are not resolved"
    return decode + mixed_shapes(
        max_num_seqs, max_tokens=config.max_num_batched_tokens, layer_bytes=layer_bytes
    )


@contextmanager
def _logged(work: str) -> Iterator[None]:
    """Say in the log how long a part of the start took."""
    started_s = time.perf_counter()
    yield
    logger.info("%s in %.1f s", work, time.perf_counter() - started_s)
