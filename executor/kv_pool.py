"""How many KV blocks the pool gets."""

import logging
from dataclasses import dataclass

from octavo.block_manager.block_table import BlockSpec, blocks_needed
from octavo.config import EngineConfig
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CPU_POOL_BYTES = 4 * 2**30
CPU_POOL_SHARE = 0.25
"""Unless told otherwise, the pool takes no more than this of the memory that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """What the pool is asked to hold: ``max_num_seqs`` requests of ``max_model_len`` tokens."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    block_bytes: int


def find_cpu_budget(free_bytes: int) -> int:
    """Return the bytes that a pool in main memory takes at most."""
    return min(MAX_CPU_POOL_BYTES, int(CPU_POOL_SHARE * free_bytes))


def size_pool(config: EngineConfig, demand: PoolDemand, *, budget_bytes: int) -> int:
    """Return the number of blocks of the pool; the budget counts where no setting gives a size.

    Raises:
        ConfigError: a measured pool has no room for one request of an explicit ``max_model_len``,
            or for one block.
    """
    one_request = blocks_needed(BlockSpec(demand.block_size), demand.max_model_len)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // demand.block_bytes
    else:
        num_blocks = min(budget_bytes // demand.block_bytes, demand.max_num_seqs * one_request)
    if num_blocks < one_request:
        _refuse_or_warn(config, demand, num_blocks)
    return num_blocks


def _refuse_or_warn(config: EngineConfig, demand: PoolDemand, num_blocks: int) -> None:
    """Deal with a pool that is smaller than one request may be."""
    num_tokens = num_blocks * demand.block_size
    is_measured = config.num_gpu_blocks_override is None
    if num_blocks == 0 or (is_measured and config.max_model_len is not None):
        raise ConfigError(
            f"max_model_len is {demand.max_model_len}, but the KV pool has room for {num_tokens} "
            f"tokens ({num_blocks} blocks of {demand.block_bytes} bytes): lower max_model_len or "
            "raise kv_cache_memory_bytes"
        )
    logger.warning(
        "requests are limited to %d tokens: the KV pool has %d blocks of %d, max_model_len is %d",
        num_tokens,
        num_blocks,
        demand.block_size,
        demand.max_model_len,
    )
