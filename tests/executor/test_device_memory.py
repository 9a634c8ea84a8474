"""What is left for K/V on a card, and what is said when nothing is."""

import pytest

from octavo.errors import ConfigError
from octavo.executor.device_memory import (
    GIB,
    GRAPH_BYTES,
    MARGIN_BYTES,
    TOKEN_BYTES,
    MemoryUse,
    find_graph_bytes,
)
from octavo.executor.step_program import StepShape


def make_use(**parts):
    sizes = {"total": 100, "others": 0, "weights": 20, "activations": 5, "graphs": 1, **parts}
    return MemoryUse(**{name: size * GIB for name, size in sizes.items()})


def test_the_pool_gets_what_the_share_leaves():
    assert make_use().find_pool_bytes(0.9) == (90 - 26) * GIB - MARGIN_BYTES


def test_memory_of_other_processes_is_not_ours():
    assert make_use(others=50).find_pool_bytes(0.9) == (50 - 26) * GIB - MARGIN_BYTES
    assert make_use(others=5).find_pool_bytes(0.9) == make_use().find_pool_bytes(0.9)


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"weights": 95}, "take a smaller model"),
        ({"activations": 80}, "lower max_num_batched_tokens or max_num_seqs"),
        ({"graphs": 80}, "set enforce_eager or fewer cuda_graph_sizes"),
        ({"others": 80}, "end other processes on the card"),
    ],
)
def test_without_room_the_largest_part_is_named_with_what_to_change(parts, advice):
    with pytest.raises(ConfigError, match=r"weights .* GiB, activations .* GiB") as caught:
        make_use(**parts).find_pool_bytes(0.9)
    assert advice in str(caught.value)


def test_graphs_need_memory_only_where_there_are_some():
    assert find_graph_bytes([], 1_000) == 0


def test_every_graph_keeps_its_logits_and_shares_the_rest():
    shapes = [StepShape.padded(8, 8), StepShape.padded(32, 64)]
    both, small, large = (find_graph_bytes(part, 1_000) for part in (shapes, *zip(shapes)))
    assert both == large + small - 8 * TOKEN_BYTES
    assert large == GRAPH_BYTES + 32 * 2 * 1_000 + 64 * TOKEN_BYTES
