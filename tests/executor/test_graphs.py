"""Which batch sizes get a graph."""

from itertools import pairwise

import pytest

from octavo.executor.graphs import DecodeGraphs, default_sizes


def make_graphs(sizes):
    return DecodeGraphs(sizes, create=lambda size: None, edited=None)


@pytest.mark.parametrize("max_rows", [1, 3, 8, 64, 100, 1024])
def test_default_sizes_reach_the_maximum_and_pad_little(max_rows):
    sizes = default_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    for smaller, larger in pairwise(sizes):
        assert larger - smaller <= max(8, smaller // 8)


def test_a_step_is_padded_to_the_next_size(monkeypatch):
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    graphs = make_graphs([1, 4, 8])
    assert [graphs.find_size(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]


def test_without_sizes_no_step_has_a_graph():
    assert make_graphs([]).find_size(1) is None
