"""The compiled sampling kernels: whole vocabularies, distributions, graphs."""

import numpy as np
import pytest
import torch

from octavo.executor.ops.edit_logits import edit_logits
from octavo.executor.ops.sample import SampleWorkspace, sample
from tests.executor.ops.device_sampling import DEVICE, make_logits, make_requests

pytestmark = pytest.mark.gpu

VOCAB = 151_936
KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_k": 60_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 1e-4},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 50_000, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 1.0, "allowed_token_ids": (5, 77, 151_935), "top_p": 0.9},
]


def make_mix(num_rows, *, first_seed=0):
    return make_requests(
        *(
            ((7, 8), {"seed": first_seed + row, **KINDS[row % len(KINDS)]})
            for row in range(num_rows)
        )
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_whole_vocabularies_get_the_cpus_tokens(spread, dtype):
    requests = make_mix(3 * len(KINDS), first_seed=int(spread * 1000))
    logits = make_logits(3 * len(KINDS), VOCAB, spread=spread, dtype=dtype, seed=int(spread * 10))
    token_ids, faults = requests.sample(logits)
    expected = requests.expect(logits)
    assert not faults.any()
    assert token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize("vocab_size", [32_000, 50_257])
def test_any_number_of_rows_gets_the_cpus_tokens(num_rows, vocab_size):
    requests = make_requests(
        *(((7,), {"seed": row, **KINDS[row % 9]}) for row in range(num_rows)), num_padding=3
    )
    logits = make_logits(num_rows + 3, vocab_size, spread=3.0)
    token_ids, _ = requests.sample(logits)
    assert token_ids[3:].tolist() == requests.expect(logits[3:]).token_ids.tolist()


def exact_probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    scaled = np.sort(logits / temperature)[::-1]
    weights = np.exp(scaled - scaled[0])
    limit = top_k or len(weights)
    kept = weights[:limit] / weights[:limit].sum()
    size = int((np.cumsum(kept) - kept < top_p).sum())
    lowest = max(scaled[size - 1], scaled[0] + np.log(max(min_p, 1e-300)))
    weights = np.where(logits / temperature >= lowest, np.exp(logits / temperature - scaled[0]), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 30},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_tokens_come_as_often_as_the_filtered_softmax_says(params):
    size, rounds, vocab_size = 1000, 60, 500
    row = make_logits(1, vocab_size, spread=1.5)
    logits = row.expand(size, vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    requests = make_requests(
        *(((), {"temperature": 1.0, "seed": s, **params}) for s in range(size))
    )
    for position in range(3, 3 + rounds):
        requests.batch.positions.fill_(position)
        token_ids, _ = requests.sample(logits)
        counts += torch.bincount(token_ids.long().cpu(), minlength=vocab_size)
    expected = exact_probabilities(row[0].double().cpu().numpy(), **params) * size * rounds
    found = counts.numpy()
    assert not found[expected == 0].any()
    is_frequent = expected > 10
    difference = found[is_frequent] - expected[is_frequent]
    statistic = (difference**2 / expected[is_frequent]).sum()
    degrees = is_frequent.sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_one_graph_serves_every_parameter_and_never_waits_for_the_host():
    size = 2 * len(KINDS)
    logits = make_logits(size, VOCAB, spread=3.0)
    requests = make_requests(*(((7, 8), {}) for _ in range(size)))
    workspace = SampleWorkspace.create(size, DEVICE)
    edited = torch.empty(logits.shape, dtype=torch.float32, device=DEVICE)

    def run():
        edit_logits(logits, requests.batch, edited=edited)
        sample(logits, requests.batch, workspace=workspace, edited=edited)

    torch.cuda.set_sync_debug_mode("error")
    run()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        mix = make_mix(size, first_seed=seed * 100)
        requests.batch.parameters.copy_(mix.batch.parameters)
        logits.copy_(make_logits(size, VOCAB, spread=3.0, seed=seed))
        graph.replay()
        expected = mix.expect(logits).token_ids.tolist()
        assert workspace.token_ids.tolist() == expected
