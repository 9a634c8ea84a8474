"""The pool's size follows the first of: an override, given bytes, what is free and needed."""

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_pool import PoolDemand, find_cpu_budget, size_pool

BLOCK_BYTES = 2**20
GIB = 2**30


def size(*, budget_bytes=4 * GIB, max_num_seqs=2, block_size=16, **settings):
    """Blocks for requests of 100 tokens; ``settings`` are fields of EngineConfig."""
    demand = PoolDemand(
        max_num_seqs=max_num_seqs,
        max_model_len=100,
        block_size=block_size,
        block_bytes=BLOCK_BYTES,
    )
    return size_pool(EngineConfig(**settings), demand, budget_bytes=budget_bytes)


def test_the_pool_is_no_larger_than_all_rows_need():
    assert size() == 2 * 7
    assert size(block_size=1) == 2 * 100


def test_the_pool_takes_its_budget_whole_when_the_rows_need_more():
    assert size(max_num_seqs=10_000, budget_bytes=GIB) == 1024


def test_a_cpus_budget_is_a_quarter_of_the_free_memory_and_four_gib_at_most():
    assert find_cpu_budget(GIB) == GIB // 4
    assert find_cpu_budget(64 * GIB) == 4 * GIB


def test_given_bytes_are_used_whole():
    assert size(kv_cache_memory_bytes=100 * BLOCK_BYTES + 5, budget_bytes=0) == 100


def test_an_override_wins():
    assert size(num_gpu_blocks_override=9, kv_cache_memory_bytes=1, budget_bytes=0) == 9


@pytest.mark.parametrize(
    ("budget_bytes", "settings"),
    [(0, {"kv_cache_memory_bytes": 6 * BLOCK_BYTES}), (6 * BLOCK_BYTES, {})],
)
def test_an_explicit_length_above_a_measured_pool_stops_the_start(budget_bytes, settings):
    message = r"max_model_len is 100, but the KV pool has room for 96 tokens \(6 blocks"
    with pytest.raises(ConfigError, match=message):
        size(budget_bytes=budget_bytes, max_model_len=100, **settings)


@pytest.mark.parametrize("settings", [{"max_model_len": 100}, {}])
def test_a_length_above_an_override_is_clipped_with_a_warning(settings, caplog):
    assert size(num_gpu_blocks_override=6, **settings) == 6
    assert "requests are limited to 96 tokens" in caplog.text


def test_the_models_own_length_above_a_measured_pool_is_clipped_with_a_warning(caplog):
    assert size(kv_cache_memory_bytes=6 * BLOCK_BYTES) == 6
    assert "requests are limited to 96 tokens" in caplog.text


def test_a_pool_without_a_block_stops_the_start():
    with pytest.raises(ConfigError, match=r"room for 0 tokens"):
        size(kv_cache_memory_bytes=BLOCK_BYTES - 1)


def test_enough_room_is_no_reason_for_a_warning(caplog):
    assert size(num_gpu_blocks_override=7, max_model_len=100) == 7
    assert not caplog.text
