"""Edited logits are those of the CPU's sampler, and rows without edits stay as they are."""

import numpy as np
import pytest
import torch

from octavo.executor import logit_edits
from octavo.executor.ops import edit_logits as module
from octavo.executor.ops.edit_logits import edit_logits
from tests.executor.ops.device_sampling import DEVICE, make_logits, make_requests

VOCAB = 90
EDITS = [
    {"allowed_token_ids": (3, 50, 89)},
    {"logit_bias": ((3, 2.5), (89, -1e30), (0, 1e300))},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.25},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 0.6},
    {"min_tokens": 7, "held_back_ids": (0, 44)},
    {"min_tokens": 6, "held_back_ids": (0, 44)},
    {"bad_words_ids": ((12,), (10, 8, 9, 9, 33), (5, 6), (9, 9, 9), (8, 34), (9, 35))},
    {
        "allowed_token_ids": tuple(range(5, 60)),
        "bad_words_ids": ((9, 36),),
        "min_tokens": 40,
        "held_back_ids": (11,),
        "logit_bias": ((9, 3.0), (36, 5.0), (70, 5.0), (3, 1.0), (4, -0.5)),
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
    },
]
OUTPUTS = (6, 10, 8, 9, 9, 9)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(module, "TILE", 32)
    monkeypatch.setattr(module, "NUM_SPLITS", 2)


def run(logits, requests):
    edited = torch.full(logits.shape, torch.nan, device=DEVICE)
    edit_logits(logits, requests.batch, edited=edited)
    return edited.cpu()


def expect(logits, requests):
    scores = logits.float().cpu().clone()
    rows = np.arange(len(requests.edit_lists), dtype=np.int32)
    logit_edits.edit_logits(scores, requests.host, rows)
    return scores


@pytest.mark.parametrize("params", EDITS)
def test_every_edit_equals_the_cpus(params):
    requests = make_requests((OUTPUTS, params), ((), params))
    logits = make_logits(2, VOCAB)
    torch.testing.assert_close(run(logits, requests), expect(logits, requests))


def test_all_edits_of_a_batch_equal_the_cpus_in_16_bits():
    requests = make_requests(*((OUTPUTS, params) for params in EDITS))
    logits = make_logits(len(EDITS), VOCAB, dtype=torch.bfloat16)
    torch.testing.assert_close(run(logits, requests), expect(logits, requests))


def test_rows_without_edits_and_padding_are_not_written():
    requests = make_requests((OUTPUTS, {"temperature": 1.0}), (OUTPUTS, EDITS[0]), num_padding=1)
    logits = make_logits(3, VOCAB)
    edited = run(logits, requests)
    assert edited[:2].isnan().all()
    assert not edited[2].isnan().any()


def test_the_models_logits_stay_as_they_are():
    requests = make_requests((OUTPUTS, EDITS[-1]))
    logits = make_logits(1, VOCAB)
    before = logits.clone()
    run(logits, requests)
    assert torch.equal(logits, before)
