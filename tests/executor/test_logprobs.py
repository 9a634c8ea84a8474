"""Log-probabilities are those of the raw logits."""

import numpy as np
import torch

from octavo.executor.logprobs import find_logprobs

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [5.0, 5.0, -torch.inf, 1.0]])
EXPECTED = LOGITS.log_softmax(-1)


def find(token_ids, counts):
    return find_logprobs(LOGITS, np.array(token_ids, dtype=np.int32), counts)


def test_the_token_that_is_there_comes_first_and_the_likeliest_follow():
    first, second = find([2, 3], [2, 1])
    assert first.ids.tolist() == [2, 1, 2]
    np.testing.assert_allclose(first.logprobs, EXPECTED[0, [2, 1, 2]], rtol=1e-6)
    assert len(second.ids) == 2
    assert second.ids[0] == 3
    assert (first.ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)


def test_rank_counts_the_likelier_tokens():
    assert [entry.rank for entry in find([2, 1], [0, 0])] == [2, 1]


def test_minus_one_reports_the_whole_vocabulary_in_order():
    entry = find([0, 0], [-1, 0])[0]
    assert entry.ids.tolist() == [0, 1, 2, 0, 3]


def test_more_than_the_vocabulary_reports_all_of_it():
    assert len(find([0, 0], [100, 0])[0].ids) == 5


def test_a_masked_logit_has_minus_infinity():
    entry = find([0, 2], [0, 0])[1]
    assert entry.logprobs[0] == -np.inf
    assert entry.rank == 4


def test_sixteen_bit_logits_are_computed_in_float32():
    entry = find_logprobs(LOGITS[:1].bfloat16(), np.array([1], dtype=np.int32), [0])[0]
    np.testing.assert_allclose(entry.logprobs[0], EXPECTED[0, 1], rtol=1e-6)
