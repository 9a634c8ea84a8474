"""In which order plans look at the queue, and that nobody is passed for ever."""

from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.block_manager.block_pool import KeyWatch
from octavo.engine import waiting_queue
from octavo.engine.key_tree import KeyTree
from octavo.engine.policies import DepthFirst, LongestPrefixMatch
from octavo.engine.waiting_queue import MAX_PASSED, WaitingQueue
from tests.engine.liveness import WatchedRun
from tests.engine.requests import add_request, make_add, make_core, make_scheduler

WORDS = {name: [ord(name)] * 4 for name in "abcd"}


def spell(word):
    """Return a prompt whose blocks are the word's letters, and one more token."""
    return [token for letter in word for token in WORDS[letter]] + [9]


def make_queue(words, policy, *, cached=()):
    """Return a scheduler in which ``cached`` words have run and ``words`` wait."""
    scheduler = make_scheduler(policy=policy, max_num_seqs=1)
    for number, word in enumerate(cached, start=1_000):
        add_request(scheduler, number, spell(word), max_tokens=1)
        scheduler.plan(0.0)
        scheduler.abort([number])
    for number, word in enumerate(words):
        add_request(scheduler, number, spell(word))
    return scheduler


def look(scheduler, count=128):
    return [request.number for request in scheduler.waiting.ranked(count)]


def test_lpm_looks_at_the_longest_cached_prefix_first():
    scheduler = make_queue(["b", "a", "ac", "ab"], "lpm", cached=["ab"])
    assert look(scheduler) == [3, 1, 2, 0]


def test_lpm_ranks_again_when_a_cached_prefix_vanishes_or_appears():
    scheduler = make_queue(["b", "ab"], "lpm", cached=["ab"])
    assert look(scheduler) == [1, 0]
    scheduler.reset_prefix_cache()
    assert look(scheduler) == [0, 1]
    add_request(scheduler, 2, spell("abc"))
    assert isinstance(scheduler.policy, LongestPrefixMatch)
    scheduler.plan(0.0)
    assert list(scheduler.running) == [0]
    scheduler.abort([0, 1])
    scheduler.plan(0.0)
    assert list(scheduler.running) == [2]


def test_lpm_ranks_only_the_first_by_arrival():
    scheduler = make_scheduler(policy="lpm", ranking_window=2, max_num_seqs=1)
    add_request(scheduler, 1_000, spell("ab"), max_tokens=1)
    scheduler.plan(0.0)
    scheduler.abort([1_000])
    for number, word in enumerate(["c", "d", "ab"]):
        add_request(scheduler, number, spell(word))
    assert look(scheduler) == [0, 1]


def test_dfs_finishes_a_subtree_before_the_next_and_begins_with_what_is_cached():
    words = ["ab", "cd", "ac", "ca", "ab", "d"]
    assert look(make_queue(words, "dfs")) == [0, 4, 2, 1, 3, 5]
    assert look(make_queue(words, "dfs", cached=["c"])) == [1, 3, 0, 4, 2, 5]


@given(words=st.lists(st.text("abc", max_size=4), max_size=12), data=st.data())
def test_a_tree_yields_every_prefix_group_in_one_piece(words, data):
    scheduler = make_scheduler()
    tree = KeyTree(lambda key: False, KeyWatch())
    present = {}
    for number, word in enumerate(words):
        request = add_request(scheduler, number, spell(word))
        tree.add(request, scheduler.block_manager.chain(number).keys[1:])
        present[number] = word
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(present)))
            tree.remove(scheduler.requests[gone])
            del present[gone]
    order = [request.number for request in tree.depth_first()]
    assert sorted(order) == sorted(present)
    for length in range(1, 5):
        prefixes = [present[n][:length] for n in order if len(present[n]) >= length]
        groups = [p for i, p in enumerate(prefixes) if i == 0 or prefixes[i - 1] != p]
        assert len(groups) == len(set(groups)), order


def test_an_emptied_tree_keeps_nothing():
    scheduler = make_scheduler()
    tree = KeyTree(lambda key: False, KeyWatch())
    for number, word in enumerate(["ab", "abc", "ab", "b"]):
        tree.add(
            add_request(scheduler, number, spell(word)),
            scheduler.block_manager.chain(number).keys[1:],
        )
    for request in list(scheduler.requests.values()):
        tree.remove(request)
    assert not tree._root.children
    assert not tree._root.ending
    assert not tree._keys


def test_nobody_is_passed_for_ever():
    for policy in ("lpm", "dfs"):
        run = make_core(policy=policy, num_blocks=64, max_num_seqs=1)
        run.run([make_add(0, spell("ab"), max_tokens=1)])
        run.core.apply([make_add(1, spell("c"), max_tokens=1)])
        for number in range(2, 3 * MAX_PASSED):
            run.core.apply([make_add(number, spell("ab"), max_tokens=1)])
            run.core.apply([make_add(number + 10_000, spell("ab"), max_tokens=1)])
            run.step()
        assert 1 in run.finished
        assert len(run.finished) > MAX_PASSED, "the favourites did pass at first"


@pytest.mark.parametrize("policy", ["lpm", "dfs"])
@pytest.mark.parametrize("lag", [0, 1])
@given(
    arrivals=st.lists(st.integers(0, 3), min_size=20, max_size=60),
    max_num_seqs=st.integers(1, 3),
    num_blocks=st.integers(6, 20),
    max_tokens=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_no_stream_of_favourites_passes_anybody_more_often_than_the_bound(
    policy, lag, arrivals, max_num_seqs, num_blocks, max_tokens
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_queue, "MAX_PASSED", 4)
        run = make_core(policy=policy, lag=lag, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        run.run([make_add(0, spell("ab"), max_tokens=1)])
        favourites = count(2)
        run.core.apply([make_add(1, spell("cd"), max_tokens=max_tokens)])
        watched = WatchedRun(run)  # it counts who passes whom
        for number_of_arrivals in [8, *arrivals]:
            numbers = islice(favourites, number_of_arrivals)
            run.core.apply([make_add(n, spell("ab"), max_tokens=max_tokens) for n in numbers])
            if run.core.has_work:
                watched.step()
        while run.core.has_work:
            watched.step()


def test_requests_that_end_while_they_wait_have_passed_nobody():
    scheduler = make_queue(["ab", "ac"] + ["a"] * MAX_PASSED, "dfs")
    scheduler.abort(range(2, 2 + MAX_PASSED))
    assert scheduler.waiting._num_passed == 0


def test_being_passed_is_counted_for_the_first_of_the_queue_only():
    scheduler = make_scheduler()
    queue = WaitingQueue(DepthFirst(scheduler.block_manager))
    requests = [add_request(scheduler, number, spell("a")) for number in range(MAX_PASSED + 2)]
    for request in requests:
        queue.add(request)
    for request in requests[1:-1]:
        queue.admit(request)
    assert next(queue.ranked(1)) is requests[0]
    queue.admit(requests[0])
    assert queue._num_passed == 0
