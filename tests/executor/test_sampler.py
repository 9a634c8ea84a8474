"""Every sampling parameter does what RowSampling says, to its own row alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from octavo.executor.rows import Rows
from octavo.executor.sampler import sample
from tests.steps import make_row

VOCAB = 64
PROMPT = [3, 4, 5, 6]


def make_logits(num_rows=1, *, vocab_size=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def make_rows(*requests):
    """Rows 0, 1, ... of requests given as (token ids, keywords of RowSampling)."""
    rows = Rows(16, max_tokens=256, max_blocks=64)
    for row, (token_ids, params) in enumerate(requests):
        rows.write(make_row(row, number=row, token_ids=token_ids, num_prompt=len(PROMPT), **params))
    return rows


def sample_rows(logits, *requests):
    return sample(logits.clone(), make_rows(*requests), np.arange(len(requests), dtype=np.int32))


def sample_one(logits, outputs=(), **params):
    """Token that a row with PROMPT and ``outputs`` samples from ``logits``, (vocab_size,)."""
    result = sample_rows(logits[None], ([*PROMPT, *outputs], params))
    assert not result.errors
    return int(result.token_ids[0])


def prefer(*token_ids, vocab_size=VOCAB):
    """Logits 10, 9, 8, ... of ``token_ids`` and about 0 of all others."""
    logits = torch.linspace(0.0, 0.1, vocab_size)
    logits[list(token_ids)] = torch.arange(10.0, 10.0 - len(token_ids), -1)
    return logits


def expected_shares(logits, num_samples):
    return torch.softmax(logits.double(), -1).numpy() * num_samples


def count_samples(logits, num_samples, **params):
    """How often each token comes, over rows that differ in their seed alone."""
    counts = np.zeros(logits.shape[-1], dtype=np.int64)
    size = 500
    rows = Rows(size, max_tokens=8, max_blocks=2)
    for first in range(0, num_samples, size):
        for row in range(size):
            rows.is_held[row] = False
            rows.write(make_row(row, token_ids=PROMPT, **params, seed=first + row))
        ids = sample(logits.expand(size, -1).clone(), rows, np.arange(size, dtype=np.int32))
        counts += np.bincount(ids.token_ids, minlength=len(counts))
    return counts


def chi_square(counts, expected):
    """Chi-square statistic and degrees of freedom; rare tokens are put together."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    is_rare = expected.cumsum() < 20
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    keep = wanted > 0
    return float((((observed - wanted) ** 2)[keep] / wanted[keep]).sum()), int(keep.sum()) - 1


def assert_distribution(counts, expected):
    assert counts[expected == 0].sum() == 0
    statistic, freedom = chi_square(counts, expected)
    # Wilson-Hilferty: the cube root is nearly normal; 3.7 sigma is p = 0.0001.
    normal = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(
        2 / (9 * freedom)
    )
    assert normal < 3.7


def test_greedy_takes_the_maximum():
    logits = make_logits(3)
    result = sample_rows(logits, *[(PROMPT, {})] * 3)
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.token_ids.dtype == np.int32


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature):
    for seed in range(5):
        assert sample_one(prefer(7, 8), seed=seed, temperature=temperature, top_p=1e-4) == 7


def test_samples_follow_the_softmax():
    logits = make_logits()[0]
    counts = count_samples(logits, 20_000, temperature=1.0)
    assert_distribution(counts, expected_shares(logits, 20_000))


def test_samples_follow_the_softmax_over_temperature():
    logits = make_logits()[0]
    counts = count_samples(logits, 20_000, temperature=0.7)
    assert_distribution(counts, expected_shares(logits / 0.7, 20_000))


def test_samples_follow_the_filtered_softmax():
    logits = make_logits()[0]
    counts = count_samples(logits, 20_000, temperature=1.5, top_k=20, top_p=0.9, min_p=0.05)
    scaled = logits / 1.5
    kept = scaled.topk(20)
    probs = kept.values.softmax(-1)
    is_kept = (probs.cumsum(-1) - probs < 0.9) & (probs >= 0.05 * probs[0])
    filtered = torch.full((VOCAB,), -torch.inf)
    filtered[kept.indices[is_kept]] = kept.values[is_kept]
    assert_distribution(counts, expected_shares(filtered, 20_000))


def test_successive_positions_of_one_seed_are_independent():
    num_positions = 5000
    rows = Rows(num_positions, max_tokens=8, max_blocks=2)
    for row in range(num_positions):
        rows.write(make_row(row, token_ids=PROMPT, temperature=1.0, seed=7))
    rows.num_tokens[:] = np.arange(num_positions)
    row_ids = np.arange(num_positions, dtype=np.int32)
    tokens = sample(torch.zeros(num_positions, 8), rows, row_ids).token_ids
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert_distribution(pairs, np.full(64, (num_positions - 1) / 64))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_token_does_not_depend_on_the_company(data):
    requests, logits = [], make_logits(6, vocab_size=200)
    for _ in range(6):
        outputs = data.draw(st.lists(st.integers(0, 199), max_size=8))
        params = {
            "seed": data.draw(st.integers(0, 2**63)),
            "temperature": data.draw(st.sampled_from([0.0, 0.3, 1.0, 4.0])),
            "top_k": data.draw(st.sampled_from([0, 5, 50])),
            "top_p": data.draw(st.sampled_from([0.5, 1.0])),
            "presence_penalty": data.draw(st.sampled_from([0.0, 1.0])),
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.3])),
            "allowed_token_ids": data.draw(st.sampled_from([None, tuple(range(50, 120))])),
            "logit_bias": data.draw(st.sampled_from([(), ((60, 3.0), (61, -3.0))])),
        }
        requests.append(([*PROMPT, *outputs], params))
    together = sample_rows(logits, *requests).token_ids.tolist()
    alone = [
        int(sample_rows(logits[i : i + 1], request).token_ids[0])
        for i, request in enumerate(requests)
    ]
    assert together == alone


def test_presence_and_frequency_penalties_look_at_outputs_alone():
    assert sample_one(prefer(3, 7), presence_penalty=2.0) == 3
    assert sample_one(prefer(3, 7), frequency_penalty=2.0) == 3
    assert sample_one(prefer(3, 7), [3], presence_penalty=2.0) == 7
    assert sample_one(prefer(3, 7), [3], frequency_penalty=2.0) == 7


def test_frequency_penalty_grows_with_every_occurrence_and_presence_does_not():
    logits = prefer(3, 7)
    logits[7] = 7.5
    assert sample_one(logits, [3, 3], presence_penalty=2.0) == 3
    assert sample_one(logits, [3, 3], frequency_penalty=1.0) == 3
    assert sample_one(logits, [3, 3, 3], frequency_penalty=1.0) == 7


def test_negative_penalties_favour_what_was_said():
    assert sample_one(prefer(7, 3), [3], presence_penalty=-2.0) == 3


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0, 1e30])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits, outputs = make_logits(4), [9, 10, 9]
    history = torch.tensor([[*PROMPT, *outputs]] * 4)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    request = ([*PROMPT, *outputs], {"repetition_penalty": penalty})
    found = sample_rows(logits, *[request] * 4)
    assert found.token_ids.tolist() == expected.argmax(-1).tolist()


def test_repetition_penalty_counts_the_prompt():
    assert sample_one(prefer(3, 7), repetition_penalty=2.0) == 7


def test_only_allowed_ids_are_sampled_with_their_own_logits():
    assert sample_one(prefer(7, 8, 9), allowed_token_ids=(9, 8, 60)) == 8
    assert sample_one(prefer(7), allowed_token_ids=(63,), temperature=1.0) == 63


def test_a_bad_word_of_one_token_never_comes():
    assert sample_one(prefer(7, 8), bad_words_ids=((7,),)) == 8


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [([], 7), ([5], 7), ([5, 6], 8), ([9, 5, 6], 8), ([6, 5], 7), ([5, 6, 9], 7)],
)
def test_a_bad_word_is_stopped_at_its_last_token(outputs, expected):
    assert sample_one(prefer(7, 8), outputs, bad_words_ids=((5, 6, 7),)) == expected


def test_a_bad_word_that_began_in_the_prompt_is_not_stopped():
    assert sample_one(prefer(7, 8), bad_words_ids=((6, 7),)) == 7


@pytest.mark.parametrize(("num_outputs", "expected"), [(0, 8), (3, 8), (4, 2), (5, 2)])
def test_ids_are_held_back_until_min_tokens_despite_their_bias(num_outputs, expected):
    params = {"min_tokens": 4, "held_back_ids": (2,), "logit_bias": ((2, 100.0),)}
    assert sample_one(prefer(8), [9] * num_outputs, **params) == expected


def test_logit_bias_is_added():
    assert sample_one(prefer(7, 8), logit_bias=((8, 5.0),)) == 8
    assert sample_one(prefer(7, 8), logit_bias=((7, -100.0),)) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_enormous_bias_wins_and_stays_finite(temperature):
    assert sample_one(prefer(7), logit_bias=((9, 1e300),), temperature=temperature) == 9


def test_bias_comes_after_the_masks_and_before_the_penalties():
    assert sample_one(prefer(7), allowed_token_ids=(8, 9), logit_bias=((7, 50.0), (9, 1.0))) == 9
    assert sample_one(prefer(7, 8), [8], logit_bias=((8, 2.0),), presence_penalty=2.0) == 7


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_is_an_error_of_its_row(fault):
    logits = make_logits(4)
    logits[1, 5] = fault
    expected = logits.argmax(-1).tolist()
    params = [{}, {}, {}, {"temperature": 1e-3}]
    result = sample_rows(logits, *[(PROMPT, p) for p in params])
    assert list(result.errors) == [1]
    assert "not finite" in result.errors[1]
    assert [int(result.token_ids[i]) for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_a_row_without_any_finite_logit_is_an_error():
    logits = torch.full((1, VOCAB), -torch.inf)
    assert list(sample_rows(logits, (PROMPT, {"temperature": 1.0})).errors) == [0]


def test_single_masked_logits_are_no_error():
    logits = prefer(7, 8)
    logits[7] = -torch.inf
    assert sample_one(logits, temperature=0.01) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_nothing_are_an_error_that_says_so(temperature):
    params = {"allowed_token_ids": (2,), "held_back_ids": (2,), "min_tokens": 1}
    request = (PROMPT, {**params, "temperature": temperature})
    result = sample_rows(make_logits(2), request, (PROMPT, {}))
    assert list(result.errors) == [0]
    assert "no token is left" in result.errors[0]


def test_ids_of_errors_are_within_the_vocabulary():
    logits = torch.full((1, VOCAB), torch.nan)
    assert 0 <= sample_rows(logits, (PROMPT, {})).token_ids[0] < VOCAB


def test_logprobs_are_of_the_raw_logits():
    logits = prefer(7, 8)
    params = {"num_logprobs": 1, "allowed_token_ids": (8,), "temperature": 2.0}
    result = sample_rows(logits[None], (PROMPT, params))
    entry = result.logprobs[0]
    assert entry.ids.tolist() == [8, 7]
    np.testing.assert_allclose(entry.logprobs, logits.log_softmax(-1)[[8, 7]], rtol=1e-5)
    assert entry.rank == 2


def test_sixteen_bit_logits_are_sampled_in_float32():
    logits = prefer(7, 8).half()
    assert sample_one(logits, temperature=1e-6) == 7


def test_a_greedy_batch_builds_no_scores(monkeypatch):
    monkeypatch.delattr("octavo.executor.sampler.edit_logits")
    assert sample_one(prefer(7), top_k=5, top_p=0.5, seed=3) == 7
