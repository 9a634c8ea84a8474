"""Brings up one device: loads the model, sizes the KV pool, builds the runner.

On a CPU, torch's own threads compute: one per core, or OMP_NUM_THREADS. Where other processes want
the cores too, OMP_WAIT_POLICY=passive must be in the environment before torch is imported: threads
that spin while they wait make a step many times slower.
"""

import logging
import os
from pathlib import Path

import torch

from octavo.attention.reference import ReferenceBackend
from octavo.config import DEVICE_DEFAULTS, EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_pool import PoolDemand, size_pool
from octavo.executor.model_runner import ModelRunner
from octavo.executor.step import ExecutorInfo
from octavo.models.config import ModelConfig
from octavo.models.fingerprint import cache_namespace
from octavo.models.loader import load_config, load_model, resolve_dtype
from octavo.models.source import ModelSource

logger = logging.getLogger(__name__)


def create_runner(config: EngineConfig, source: ModelSource) -> ModelRunner:
    """Load the model that ``source`` names and give it a KV pool and rows.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelLoadError: the checkpoint cannot be loaded.
    """
    device = _resolve_device(config)
    model_config = load_config(source)
    max_model_len = _resolve_max_model_len(config, model_config)
    dtype = resolve_dtype(config.dtype, model_config, device)
    model = load_model(source, model_config, dtype=dtype, device=device)
    spec = model.kv_cache_spec(config.block_size)
    demand = PoolDemand(
        max_num_seqs=config.max_num_seqs or DEVICE_DEFAULTS[device.type]["max_num_seqs"],
        max_model_len=max_model_len,
        block_bytes=spec.num_block_elements() * dtype.itemsize,
    )
    num_blocks = size_pool(config, demand, free_bytes=find_free_memory())
    logger.info("KV pool: %d blocks of %d bytes", num_blocks, demand.block_bytes)
    info = ExecutorInfo(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_rows=demand.max_num_seqs,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        cache_namespace=cache_namespace(
            source,
            model_config,
            dtype=dtype,
            kv_dtype=dtype,
            block_size=config.block_size,
            tensor_parallel_size=config.tensor_parallel_size,
        ),
    )
    backend = ReferenceBackend(spec, num_blocks, dtype=dtype, device=device)
    return ModelRunner(model, backend, info)


def find_free_memory() -> int:
    """Return the bytes that this process may still take without swapping, as Linux sees it."""
    free = [_read_available_memory()]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - int(used.read_text()))
    return max(0, min(free))


def _read_available_memory() -> int:
    table = Path("/proc/meminfo")
    if not table.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in table.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda":
        raise ConfigError("device is cuda; this version computes on the CPU: use cpu or auto")
    return torch.device("cpu")


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model has {limit} positions: "
            "lower max_model_len"
        )
    return config.max_model_len
