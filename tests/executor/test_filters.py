"""Top-k, top-p and min-p keep what the filters of transformers keep."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.executor.filters import filter_scores


def make_scores(num_rows, vocab_size, *, spread=3.0, seed=0):
    scores = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    scores = scores * spread
    return scores - scores.amax(dim=1, keepdim=True)


def keep(scores, *, top_k=0, top_p=1.0, min_p=0.0):
    """Mask of what stays; parameters are numbers or one per row."""
    columns = {
        "top_k": (top_k, np.int32),
        "top_p": (top_p, np.float32),
        "min_p": (min_p, np.float32),
    }
    arrays = {
        name: np.broadcast_to(np.array(value, dtype), len(scores)).copy()
        for name, (value, dtype) in columns.items()
    }
    filtered = scores.clone()
    filter_scores(filtered, **arrays)
    kept = filtered > -torch.inf
    assert torch.equal(filtered[kept], scores[kept])
    return kept


def keep_by_transformers(scores, *, top_k, top_p, min_p):
    processors = LogitsProcessorList()
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors(None, scores.double()) > -torch.inf


@pytest.mark.parametrize("top_k", [0, 1, 7, 2000])
@pytest.mark.parametrize("top_p", [1e-4, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_keep_what_transformers_keeps(top_k, top_p, min_p):
    scores = make_scores(8, 3000)
    parameters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert torch.equal(keep(scores, **parameters), keep_by_transformers(scores, **parameters))


def test_a_nucleus_wider_than_the_candidates_is_found():
    scores = make_scores(4, 5000, spread=0.1)
    expected = keep_by_transformers(scores, top_k=0, top_p=0.9, min_p=0)
    assert expected.sum(1).min() > 1024
    assert torch.equal(keep(scores, top_p=0.9), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_row_is_filtered_alike_alone_and_in_company(data):
    num_rows = data.draw(st.integers(2, 6))
    spread = data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    scores = make_scores(num_rows, 1500, spread=spread)
    rows = [
        {
            "top_k": data.draw(st.sampled_from([0, 1, 40, 1200, 9999])),
            "top_p": data.draw(st.sampled_from([0.01, 0.5, 0.95, 1.0])),
            "min_p": data.draw(st.sampled_from([0.0, 0.1])),
        }
        for _ in range(num_rows)
    ]
    together = keep(scores, **{name: [row[name] for row in rows] for name in rows[0]})
    for index, row in enumerate(rows):
        assert torch.equal(together[index], keep(scores[index : index + 1], **row)[0])


def test_ties_with_the_last_kept_token_stay():
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    assert keep(scores, top_k=2).tolist() == [[True, True, True, True, False]]


def test_the_likeliest_token_stays_whatever_the_filters():
    scores = torch.zeros(1, 50)
    scores[0, 1:] = -torch.inf
    assert keep(scores, top_k=1, top_p=1e-30, min_p=1.0).tolist()[0].count(True) == 1


def test_without_filters_all_finite_scores_stay():
    scores = make_scores(2, 3000)
    scores[0, 5] = -torch.inf
    assert keep(scores).sum(1).tolist() == [2999, 3000]
