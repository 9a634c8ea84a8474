"""Sampling on the device gives the tokens of the CPU's sampler, whatever the mix of rows."""

import pytest
import torch

from octavo.executor.ops import sample as sample_module
from octavo.executor.ops.bracket import HIGH, LOW
from octavo.executor.ops.choose import EXHAUSTED, NON_FINITE
from tests.executor.ops.device_sampling import (
    DEVICE,
    MAX_TOKENS,
    POISON,
    make_logits,
    make_requests,
    use_small_programs,
)

# The interpreter warns of infinities that a GPU's arithmetic is meant for.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 1500
MIX = [
    ((), {}),
    ((7, 7, 9), {"temperature": 1.0, "seed": 5}),
    ((7,), {"temperature": 0.8, "top_k": 20, "seed": 6}),
    ((7,), {"temperature": 1.0, "top_p": 0.7, "seed": 7}),
    ((7,), {"temperature": 1.3, "min_p": 0.1, "seed": 2**62}),
    ((8, 9), {"temperature": 1.0, "top_k": 50, "top_p": 0.6, "min_p": 0.05, "seed": 2**63 + 5}),
    ((8, 9, 9), {"repetition_penalty": 1.3, "presence_penalty": 1.0}),
    ((8,), {"temperature": 1.0, "logit_bias": ((5, 6.0), (9, 7.0)), "seed": 3}),
]
FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 10**9},
    {"top_p": 1e-4},
    {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.5},
    {"min_p": 1.0},
]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    use_small_programs(monkeypatch)


def assert_equals_host(logits, requests, *, num_padding=0, **more):
    token_ids, faults = requests.sample(logits, **more)
    expected = requests.expect(logits[num_padding:])
    assert token_ids[num_padding:].tolist() == expected.token_ids.tolist()
    assert not faults[num_padding:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_kind_get_the_cpus_tokens(dtype):
    logits = make_logits(len(MIX), VOCAB, dtype=dtype)
    assert_equals_host(logits, make_requests(*MIX))


@pytest.mark.parametrize("params", FILTERS)
def test_many_equal_logits_get_the_cpus_tokens(params):
    logits = make_logits(1, 600).round()  # about 13 values
    assert_equals_host(logits, make_requests(((), {"temperature": 1.0, "seed": 1, **params})))


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_logits_that_are_all_equal_get_the_cpus_tokens(params):
    requests = make_requests(((), {"temperature": 0.7, "seed": 4, **params}))
    assert_equals_host(torch.full((1, 700), -3.5, device=DEVICE), requests)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}, {}])
def test_masked_logits_are_never_sampled(params):
    logits = torch.full((1, 700), -torch.inf, device=DEVICE)
    logits[0, [17, 680]] = torch.tensor([1.0, 2.0], device=DEVICE)
    assert_equals_host(logits, make_requests(((), {"temperature": 9.0, "seed": 4, **params})))


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 2, "top_p": 0.6}])
def test_a_row_whose_sample_is_masked_gets_the_cpus_token(monkeypatch, params):
    monkeypatch.setattr(sample_module, "SAMPLE", 64)  # 2 chunks of 32 neighbours
    params = {"temperature": 9.0, "allowed_token_ids": (40, 50, 60, 70), **params}
    rows = [((), {"seed": seed, **params}) for seed in range(4)]
    assert_equals_host(make_logits(1, 300).expand(4, 300), make_requests(*rows))


@pytest.mark.parametrize(
    "params", [{"top_k": 400}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.9}, {"min_p": 0.05}]
)
def test_a_list_that_is_too_short_costs_time_and_nothing_else(params):
    logits = make_logits(1, VOCAB, spread=0.5)
    requests = make_requests(((), {"temperature": 1.0, "seed": 9, **params}))
    assert_equals_host(logits, requests, capacity=16)
    assert requests.num_listed > 16


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 1000}])
def test_what_is_above_the_bracket_takes_part_and_is_not_listed(monkeypatch, params):
    monkeypatch.setattr(sample_module, "MAX_LISTED", 300)
    requests = make_requests(((), {"temperature": 1.0, "seed": 1, **params}))
    assert_equals_host(make_logits(1, 2000, spread=0.3), requests)
    assert requests.workspace.brackets[0, HIGH.value].isfinite()
    assert requests.num_listed < 20


@pytest.mark.parametrize("params", [{"top_p": 0.3}, {"top_k": 150}, {"top_p": 0.3, "min_p": 0.75}])
def test_what_wins_inside_the_bracket_is_checked_against_the_row(monkeypatch, params):
    monkeypatch.setattr(sample_module, "MAX_LISTED", 16)
    logits = make_logits(1, 500, spread=0.1).expand(8, 500).contiguous()
    rows = [((), {"temperature": 1.0, "seed": seed, **params}) for seed in range(8)]
    requests = make_requests(*rows)
    assert_equals_host(logits, requests)
    low, high = requests.workspace.brackets[0, [LOW.value, HIGH.value]]
    winners = logits[0, requests.workspace.token_ids.long()]
    is_inside = (winners >= low) & (winners < high)
    assert 0 < is_inside.sum() < 8


@pytest.mark.parametrize("shift", [-0.5, 0.5])
@pytest.mark.parametrize("params", [{"top_p": 0.7}, {"top_k": 1000}, {"top_p": 0.7, "min_p": 0.23}])
def test_a_sample_that_misleads_costs_time_and_nothing_else(monkeypatch, shift, params):
    monkeypatch.setattr(sample_module, "SAMPLE", 512)  # 16 chunks of 32 neighbours
    monkeypatch.setattr(sample_module, "MAX_LISTED", 300)
    logits = make_logits(1, 2000, spread=0.3)
    logits[:, torch.arange(2000, device=DEVICE) % (2000 // 16) >= 32] += shift
    requests = make_requests(((), {"temperature": 1.0, "seed": 2, **params}))
    assert_equals_host(logits, requests)
    low, high = requests.workspace.brackets[0, [LOW.value, HIGH.value]]
    shares = logits.float().softmax(1) * 1000 / 0.7 if "top_p" in params else logits.float() * 0 + 1
    assert high.isfinite()
    assert shares[logits >= high].sum() > 1000 or shares[logits >= low].sum() < 1000


def test_padding_rows_write_nothing():
    requests = make_requests(((7,), {}), ((7,), {"temperature": 1.0, "top_k": 3}), num_padding=2)
    logits = make_logits(4, 300)
    token_ids, faults = requests.sample(logits)
    assert token_ids[:2].tolist() == faults[:2].tolist() == [POISON, POISON]
    assert token_ids[2:].tolist() == requests.expect(logits[2:]).token_ids.tolist()


def test_the_token_joins_its_rows_history_and_nothing_else_changes():
    requests = make_requests(((7, 8), {}), ((), {"temperature": 1.0}))
    before = requests.batch.history.clone()
    token_ids, _ = requests.sample(make_logits(2, 300))
    for index, position in enumerate([5, 3]):
        before[requests.batch.rows[index], position] = token_ids[index]
    assert torch.equal(requests.batch.history, before)
    assert before.shape[1] == MAX_TOKENS


@pytest.mark.parametrize("num_programs", [1, 5])
def test_a_row_gets_the_same_in_any_company_and_any_cut(monkeypatch, num_programs):
    logits = make_logits(1, VOCAB)
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    monkeypatch.setattr(sample_module, "NUM_PROGRAMS", num_programs)
    assert_equals_host(logits, make_requests(((7,), params)))


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"top_k": 150}, {"top_p": 0.8}, None])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_a_fault_of_their_row(monkeypatch, params, value):
    monkeypatch.setattr(sample_module, "MAX_LISTED", 16)
    params = {} if params is None else {"temperature": 1.0, **params}
    logits = make_logits(2, 300)
    logits[0, 200] = value
    token_ids, faults = make_requests(((), params), ((), params)).sample(logits)
    assert faults.tolist() == [NON_FINITE.value, 0]
    assert token_ids[0] == 0


def test_a_row_without_a_token_left_is_told_from_a_broken_one():
    masked = {"allowed_token_ids": (5,), "bad_words_ids": ((5,),)}
    requests = make_requests(((), masked), ((), {}), ((), {**masked, "temperature": 1.0}))
    logits = make_logits(3, 300)
    logits[1] = -torch.inf
    logits[2, 7] = torch.nan  # masked, but the model failed all the same
    _, faults = requests.sample(logits)
    assert faults.tolist() == [EXHAUSTED.value, NON_FINITE.value, NON_FINITE.value]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_without_a_token_left_is_exhausted_whatever_its_filter(params):
    masked = {"allowed_token_ids": (5,), "bad_words_ids": ((5,),)}
    requests = make_requests(((), {**masked, "temperature": 1.0, **params}))
    _, faults = requests.sample(make_logits(1, 300))
    assert faults.tolist() == [EXHAUSTED.value]


def test_tokens_come_as_often_as_their_probability_says():
    size = 24
    requests = make_requests(*(((), {"temperature": 0.5, "seed": seed}) for seed in range(size)))
    logits = torch.tensor([[0.0, 0.5, -0.5]], device=DEVICE).expand(size, 3).contiguous()
    token_ids, _ = requests.sample(logits)
    expected = (logits[0] / 0.5).softmax(0).cpu() * size
    found = torch.bincount(token_ids.long().cpu(), minlength=3)
    assert ((found - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees, 0.1 %
