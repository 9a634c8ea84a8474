"""Matching, allocation, sealing, release and what is counted, with block ids spelled out."""

from itertools import count

from octavo.block_manager.block_table import BlockSpec, blocks_needed
from octavo.block_manager.hashing import KeyChain, root_key
from octavo.block_manager.manager import NO_MATCH, BlockManager, Coming, MissReason

LATER_NUMBERS = count(100)


def make_manager(num_blocks=8, block_size=4):
    return BlockManager(num_blocks, BlockSpec(block_size))


def register(manager, number, tokens):
    chain = KeyChain(root_key(b"n"), manager.spec.block_size)
    chain.extend(tokens)
    manager.register(number, chain)
    return len(tokens)


def start(manager, number, tokens, *, computed=None):
    """Register, match, allocate and seal ``computed`` tokens (all of them by default)."""
    num_tokens = register(manager, number, tokens)
    match = manager.match(number, num_tokens)
    manager.allocate(number, match, num_tokens)
    manager.seal(number, num_tokens if computed is None else computed)
    manager.check_invariants()
    return match


def end(manager, number):
    manager.release(number)
    manager.forget(number)
    manager.check_invariants()


def test_blocks_needed_rounds_up():
    spec = BlockSpec(4)
    assert [blocks_needed(spec, n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_sealed_prefix_is_shared_while_its_owner_runs():
    manager = make_manager()
    start(manager, 0, range(10))
    match = start(manager, 1, [*range(8), 90, 91])
    assert match.num_tokens == 8
    assert manager.block_ids(0) == (0, 1, 2)
    assert manager.block_ids(1) == (0, 1, 3)


def test_the_last_token_of_a_prompt_is_never_matched():
    manager = make_manager()
    start(manager, 0, range(8))
    assert start(manager, 1, range(8)).num_tokens == 4


def test_a_block_computed_twice_keeps_no_key_and_is_reused_first():
    manager = make_manager()
    start(manager, 0, range(8), computed=0)
    start(manager, 1, range(8), computed=0)
    manager.seal(0, 8)
    manager.seal(1, 8)
    assert manager.block_ids(1) == (2, 3)
    end(manager, 1)
    end(manager, 0)
    assert manager.pool.num_cached == 2
    register(manager, 2, [77] * 8)
    manager.allocate(2, NO_MATCH, 8)
    assert manager.block_ids(2) == (2, 3)


def test_a_chain_is_evicted_from_its_tail():
    manager = make_manager(num_blocks=4)
    start(manager, 0, range(12))
    end(manager, 0)
    start(manager, 1, [50, 51, 52, 53, 54])
    end(manager, 1)
    assert register(manager, 2, [*range(12), 99]) == 13
    assert manager.match(2, 13).num_tokens == 8


def test_the_chain_used_last_survives_the_others():
    manager = make_manager(num_blocks=5)
    start(manager, 0, [1] * 8)
    end(manager, 0)
    start(manager, 1, [2] * 8)
    end(manager, 1)
    start(manager, 2, [1] * 8 + [9])
    end(manager, 2)
    start(manager, 3, [3] * 12)
    assert manager.match(register_again(manager, [1] * 9), 9).num_tokens == 8
    assert manager.match(register_again(manager, [2] * 9), 9).num_tokens == 0


def register_again(manager, tokens):
    number = next(LATER_NUMBERS)
    register(manager, number, tokens)
    return number


def test_growth_that_does_not_fit_changes_nothing():
    manager = make_manager(num_blocks=3)
    start(manager, 0, range(8))
    assert manager.grow(0, 12) == (2,)
    assert manager.grow(0, 16) is None
    assert manager.block_ids(0) == (0, 1, 2)
    assert manager.grow(0, 12) == ()


def test_taken_blocks_count_new_ones_and_those_that_stop_being_evictable():
    manager = make_manager()
    start(manager, 0, range(9))
    start(manager, 1, range(9))
    register(manager, 2, range(13))
    match = manager.match(2, 13)
    assert manager.num_blocks_taken(match, 13) == 2
    end(manager, 0)
    end(manager, 1)
    assert manager.num_blocks_taken(match, 13) == 4


def test_blocks_that_a_running_request_will_compute_are_announced():
    manager = make_manager()
    start(manager, 0, range(16), computed=4)
    register(manager, 1, [*range(12), 90, 91])
    assert manager.coming(1, 14) == Coming(0, 8)
    manager.seal(0, 8)
    assert manager.coming(1, 14) == Coming(0, 4)
    end(manager, 0)
    assert manager.coming(1, 14) is None


def test_keys_born_in_a_plan_can_be_withdrawn():
    manager = make_manager()
    start(manager, 0, range(8))
    manager.begin_plan()
    start(manager, 1, [*range(8), 8, 9, 10, 11])
    manager.withdraw_born()
    end(manager, 0)
    end(manager, 1)
    number = register_again(manager, range(13))
    assert manager.match(number, 13).num_tokens == 8


def test_misses_are_counted_by_reason():
    manager = make_manager(num_blocks=4)
    count_start(manager, 0, range(8))
    end(manager, 0)
    count_start(manager, 1, [50] * 13)
    end(manager, 1)
    count_start(manager, 2, range(8))
    count_start(manager, 3, [60] * 3, not_read=MissReason.RECOMPUTE)
    stats = manager.stats
    assert stats.num_queries == 8 + 13 + 8 + 3
    assert stats.num_hits == 0
    assert stats.num_misses == {
        MissReason.COLD: 4 + 12,
        MissReason.TAIL: 4 + 1 + 4,
        MissReason.EVICTED: 4,
        MissReason.RECOMPUTE: 3,
    }


def count_start(manager, number, tokens, *, not_read=None):
    num_tokens = len(list(tokens))
    register(manager, number, tokens)
    match = manager.match(number, num_tokens)
    manager.count_lookup(number, match, num_tokens=num_tokens, not_read=not_read)
    manager.allocate(number, match, num_tokens)
    manager.seal(number, num_tokens)


def test_the_documented_example():
    manager = make_manager(num_blocks=8)
    start(manager, 0, range(10))
    assert start(manager, 1, [*range(8), 90, 91, 92]).num_tokens == 8
    assert manager.block_ids(1) == (0, 1, 3)
    assert manager.grow(0, 13) == (4,)
    end(manager, 0)
    start(manager, 2, [50] * 13, computed=0)
    assert manager.block_ids(2) == (2, 4, 5, 6)
    end(manager, 1)
    assert manager.pool.num_cached == 2
    assert start(manager, 3, range(10)).num_tokens == 8
    assert manager.block_ids(3) == (0, 1, 3)
