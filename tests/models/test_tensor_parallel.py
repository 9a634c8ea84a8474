"""A whole network, split over ranks, computes what it computes alone."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.layers.parallel import Shard
from tests.checkpoints import build_random_model, tiny_config
from tests.models.oracle import compute_logits, load, source_of
from tests.models.ranks import ThreadRanks

IDS = torch.tensor([1, 259, 285, 344, 0, 100])


def assert_ranks_agree_with_one(folder, *, size):
    source = source_of(folder)
    whole = compute_logits(load(source), IDS)
    ranks = ThreadRanks(size).run(lambda shard: compute_logits(load(source, shard=shard), IDS))
    for logits in ranks:
        torch.testing.assert_close(logits, whole, atol=1e-3, rtol=1e-4)
        assert torch.equal(logits.argmax(dim=-1), whole.argmax(dim=-1))


@pytest.mark.parametrize("size", [3, 9])
def test_nine_heads_run_on_three_and_on_nine_ranks(size, tiny_9heads):
    assert_ranks_agree_with_one(tiny_9heads, size=size)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("qwen2", {}), ("qwen3", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True})],
)
def test_two_ranks_compute_what_one_does(model_type, changes, tmp_path):
    build_random_model(tiny_config(model_type, **changes)).save_pretrained(tmp_path)
    assert_ranks_agree_with_one(tmp_path, size=2)


def test_nine_heads_on_two_ranks_are_refused_with_both_numbers(tiny_9heads):
    with pytest.raises(ConfigError, match=r"9 attention heads .* tensor_parallel_size 2;"):
        load(source_of(tiny_9heads), shard=Shard(rank=0, size=2))


def test_each_rank_keeps_only_its_share_of_the_kv_heads(tiny_9heads):
    source = source_of(tiny_9heads)
    on_three = load(source, shard=Shard(rank=0, size=3)).kv_cache_spec(block_size=16)
    assert on_three.num_kv_heads == 1
