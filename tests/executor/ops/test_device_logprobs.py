"""Log-probabilities on the device equal those of the CPU."""

import pytest
import torch

from octavo.executor.logprobs import find_logprobs
from octavo.executor.ops import logprobs as module
from octavo.executor.ops.logprobs import MAX_TOP, compute_logprobs
from tests.executor.ops.device_sampling import DEVICE, make_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE", 128)


def make_token_ids(*ids):
    return torch.tensor(ids, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_TOP + 1])
def test_chosen_and_likeliest_tokens_equal_the_cpus(num_top, dtype):
    logits = make_logits(3, 500, spread=4.0, dtype=dtype)
    token_ids = make_token_ids(0, 499, int(logits[2].argmax()))
    found = compute_logprobs(logits, token_ids, num_top=num_top)
    expected = find_logprobs(logits.cpu(), token_ids.cpu().numpy(), [num_top] * 3)
    assert found.ids.shape == (3, 1 + num_top)
    for row, entry in enumerate(expected):
        assert found.ranks[row] == entry.rank
        logprobs = torch.from_numpy(entry.logprobs)
        torch.testing.assert_close(found.logprobs[row].cpu(), logprobs, rtol=1e-5, atol=1e-5)
        # Equal 16-bit logits may come in any order on the CPU; the values they stand for may not.
        assert torch.equal(logits[row, found.ids[row].long()].cpu(), logits[row, entry.ids].cpu())


@pytest.mark.parametrize("num_top", [4, MAX_TOP + 1])
def test_equal_logits_share_a_rank_and_come_by_id(num_top):
    logits = torch.zeros(1, 300, device=DEVICE)
    logits[0, [7, 150, 290]] = 2.0
    found = compute_logprobs(logits, make_token_ids(290), num_top=num_top)
    assert found.ids[0, :5].tolist() == [290, 7, 150, 290, 0]
    assert found.ranks.tolist() == [1]


def test_masked_logits_come_last_and_once():
    logits = torch.full((1, 6), -torch.inf, device=DEVICE)
    logits[0, 3] = 0.0
    found = compute_logprobs(logits, make_token_ids(1), num_top=6)
    assert found.ids.tolist() == [[1, 3, 0, 1, 2, 4, 5]]
    assert found.logprobs[0, :3].tolist() == [-torch.inf, 0.0, -torch.inf]
    assert found.ranks.tolist() == [2]
