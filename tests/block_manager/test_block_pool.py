"""Which block is handed out next, and what happens to keys."""

import pytest

from octavo.block_manager.block_pool import BlockPool


def take(pool, count):
    return [pool.take() for _ in range(count)]


def fill_with_keys(pool, keys):
    """Take a block per key, key it, and release all in order."""
    blocks = take(pool, len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.assign_key(block, key)
    for block in blocks:
        pool.release(block)
    return blocks


def test_fresh_blocks_come_in_order_of_their_ids():
    assert [block.block_id for block in take(BlockPool(4), 4)] == [0, 1, 2, 3]


def test_a_block_without_a_key_is_handed_out_first_after_its_release():
    pool = BlockPool(4)
    first, _ = take(pool, 2)
    pool.release(first)
    assert pool.take() is first


def test_free_blocks_go_before_cached_ones():
    pool = BlockPool(3)
    fill_with_keys(pool, [b"a", b"b"])
    assert pool.take().block_id == 2
    assert pool.num_cached == 2


def test_the_block_released_longest_ago_is_evicted_first():
    pool = BlockPool(3)
    a, b, _ = fill_with_keys(pool, [b"a", b"b", b"c"])
    pool.share(a)
    pool.release(a)
    assert pool.take() is b
    assert pool.find(b"b") is None
    assert pool.was_evicted(b"b")
    assert pool.find(b"a") is a


def test_a_used_block_is_never_evicted():
    pool = BlockPool(2)
    a, _ = fill_with_keys(pool, [b"a", b"b"])
    pool.share(a)
    assert pool.take() is not a
    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="none of 2 blocks"):
        pool.take()


def test_one_key_belongs_to_one_block():
    pool = BlockPool(3)
    first, second = take(pool, 2)
    assert pool.assign_key(first, b"a")
    assert not pool.assign_key(second, b"a")
    assert second.key is None
    pool.release(second)
    assert pool.take() is second


def test_a_withdrawn_key_is_not_found_and_its_block_becomes_free():
    pool = BlockPool(2)
    block = pool.take()
    pool.assign_key(block, b"a")
    pool.withdraw_key(block)
    pool.release(block)
    assert pool.find(b"a") is None
    assert pool.num_cached == 0
    pool.check_invariants()


def test_dropping_the_cache_spares_used_blocks():
    pool = BlockPool(3)
    a, _ = fill_with_keys(pool, [b"a", b"b"])
    pool.share(a)
    assert pool.drop_cached() == 1
    assert pool.find(b"a") is a
    assert pool.num_available == 2
    pool.check_invariants()


def test_the_ghost_list_remembers_as_many_keys_as_there_are_blocks():
    pool = BlockPool(2)
    for key in (b"a", b"b", b"c", b"d", b"e"):
        fill_with_keys(pool, [key])
    assert [pool.was_evicted(key) for key in (b"a", b"b", b"c")] == [False, True, True]
