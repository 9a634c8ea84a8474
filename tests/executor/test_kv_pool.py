"""The pool's size follows the first of: an override, given bytes, what is free and needed."""

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.kv_pool import PoolDemand, size_pool

BLOCK_BYTES = 2**20
GIB = 2**30


def size(*, free_bytes=64 * GIB, max_num_seqs=2, **settings):
    """Blocks for requests of 100 tokens; ``settings`` are fields of EngineConfig."""
    demand = PoolDemand(max_num_seqs=max_num_seqs, max_model_len=100, block_bytes=BLOCK_BYTES)
    return size_pool(EngineConfig(**settings), demand, free_bytes=free_bytes)


def test_the_pool_is_no_larger_than_all_rows_need():
    assert size() == 2 * 7
    assert size(block_size=1) == 2 * 100


def test_the_pool_takes_a_quarter_of_the_free_memory_and_four_gib_at_most():
    assert size(max_num_seqs=10_000, free_bytes=GIB) == 256
    assert size(max_num_seqs=10_000) == 4096


def test_given_bytes_are_used_whole():
    assert size(kv_cache_memory_bytes=100 * BLOCK_BYTES + 5, free_bytes=0) == 100


def test_an_override_wins():
    assert size(num_gpu_blocks_override=9, kv_cache_memory_bytes=1, free_bytes=0) == 9


@pytest.mark.parametrize(
    ("free_bytes", "settings"),
    [(0, {"kv_cache_memory_bytes": 6 * BLOCK_BYTES}), (24 * BLOCK_BYTES, {})],
)
def test_an_explicit_length_above_a_measured_pool_stops_the_start(free_bytes, settings):
    message = r"max_model_len is 100, but the KV pool has room for 96 tokens \(6 blocks"
    with pytest.raises(ConfigError, match=message):
        size(free_bytes=free_bytes, max_model_len=100, **settings)


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
