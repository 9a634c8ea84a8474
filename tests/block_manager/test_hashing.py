"""Block keys name contents: equal contents, equal keys, in every process; anything else differs."""

import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.block_manager.hashing import KEY_BYTES, KeyChain, RecentChains, root_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=24)


def keys_of(tokens, *, block_size=4, namespace=b"n", private=None, salt=None):
    chain = KeyChain(root_key(namespace, private=private), block_size, cache_salt=salt)
    chain.extend(tokens)
    return chain.keys[1:]


@given(first=TOKENS, second=TOKENS)
def test_keys_agree_exactly_as_far_as_the_tokens_do(first, second):
    pairs = zip(keys_of(first), keys_of(second), strict=False)
    for index, (a, b) in enumerate(pairs):
        end = 4 * (index + 1)
        assert (a == b) == (first[:end] == second[:end])


@given(tokens=TOKENS, cut=st.integers(0, 24))
def test_a_chain_extended_in_pieces_equals_one_extended_at_once(tokens, cut):
    chain = KeyChain(root_key(b"n"), 4)
    chain.extend(tokens[:cut])
    chain.extend(tokens)
    assert chain.keys[1:] == keys_of(tokens)


PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=2, max_size=6)


@given(prompts=PROMPTS, salts=st.data(), num_outputs=st.integers(0, 9))
def test_keys_that_are_copied_are_those_that_are_computed(prompts, salts, num_outputs):
    """Prompts of two tokens begin alike often; in between, requests grow and are cut."""
    recent = RecentChains(capacity=2)
    for tokens in prompts:
        tokens, salt = array("i", tokens), salts.draw(st.sampled_from([None, "a"]))
        chain = KeyChain(root_key(b"n"), 4, cache_salt=salt)
        recent.extend(chain, tokens)
        assert chain.keys[1:] == keys_of(tokens, salt=salt)
        tokens.extend([1] * num_outputs)
        chain.extend(tokens)
        del tokens[len(tokens) - num_outputs // 2 :]


def test_only_what_differs_is_computed(monkeypatch):
    recent, tokens = RecentChains(), list(range(40))
    recent.extend(KeyChain(root_key(b"n"), 4), tokens)
    chain = KeyChain(root_key(b"n"), 4)
    extend, lacking = KeyChain.extend, []
    monkeypatch.setattr(
        KeyChain,
        "extend",
        lambda chain, ids: lacking.append(len(ids) // 4 - chain.num_blocks) or extend(chain, ids),
    )
    recent.extend(chain, [*tokens[:22], 7, *tokens[23:]])
    assert lacking == [1, 5]


@pytest.mark.parametrize(
    "other",
    [{"namespace": b"m"}, {"private": 0}, {"salt": ""}, {"salt": "a"}, {"block_size": 8}],
)
def test_every_part_of_the_namespace_changes_every_key(other):
    tokens = list(range(16))
    plain = keys_of(tokens)
    assert set(plain).isdisjoint(keys_of(tokens, **other))


def test_salts_and_private_namespaces_are_told_apart():
    tokens = list(range(8))
    variants = [
        {"salt": "a"},
        {"salt": "b"},
        {"salt": "private"},
        {"private": 1},
        {"private": 2},
        {"namespace": b"n\x01"},
        {"namespace": b"npriv", "private": 1},
    ]
    firsts = {keys_of(tokens, **variant)[0] for variant in variants}
    assert len(firsts) == len(variants)


def test_neighbouring_tokens_do_not_cancel_out():
    assert keys_of([1, 23, 0, 0]) != keys_of([12, 3, 0, 0])
    assert keys_of([5 + 31, 7 - 1, 0, 0]) != keys_of([5, 7, 0, 0])


def test_a_key_is_128_bits_and_chains_do_not_collide():
    chain = KeyChain(root_key(b"n"), 1)
    chain.extend(list(range(100_000)))
    assert all(len(key) == KEY_BYTES for key in chain.keys[1:10])
    assert len(set(chain.keys)) == 100_001


def test_keys_are_equal_in_another_process():
    code = (
        "from octavo.block_manager.hashing import KeyChain, root_key\n"
        "chain = KeyChain(root_key(b'n', private=3), 4, cache_salt='s')\n"
        "chain.extend(range(8)); print(chain.keys[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {keys_of(range(8), private=3, salt="s")[-1].hex()}
