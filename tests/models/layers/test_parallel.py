"""Shards together compute what the whole layer computes, and impossible splits are refused."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle, SelfAttention
from octavo.models.layers.embedding import VocabParallelEmbedding
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.parallel import HeadSplit, Shard, Span, split_heads
from octavo.models.layers.rotary import build_rotary_table
from octavo.models.registry import check_tensor_parallel
from octavo.models.rope import RopeConfig
from tests.models.oracle import dense_attention
from tests.models.ranks import ThreadRanks

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=345,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    mlp_bias=True,
    sliding_windows=(None,),
    dtype="float32",
)
STYLE = AttentionStyle(qkv_bias=True, output_bias=True, has_head_norm=True)
X, STREAM = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
NORM = RMSNorm(32, eps=1e-6)


def fill(layer):
    """Fill a layer, or a shard of it, with weights that depend on the tensors' names alone."""
    for tensor in layer.checkpoint_tensors("layer"):
        generator = torch.Generator().manual_seed(sum(tensor.name.encode()))
        tensor.target.copy_(tensor.part_of(torch.randn(tensor.shape, generator=generator)))
    return layer


def create_attention(shard):
    rotary = build_rotary_table(RopeConfig(), head_dim=8, max_positions=64)
    return fill(SelfAttention(CONFIG, shard, index=0, rotary=rotary, style=STYLE))


def create_embedding(shard):
    return fill(VocabParallelEmbedding(345, 32, shard=shard))


def assert_ranks_agree(work, *, size):
    whole = work(Shard())
    for part in ThreadRanks(size).run(work):
        torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_mlp_of_all_ranks_is_the_whole_one(size):
    assert_ranks_agree(lambda shard: fill(GatedMLP(CONFIG, shard))(X, STREAM, NORM)[1], size=size)


@pytest.mark.parametrize("size", [2, 4])
def test_attention_of_all_ranks_is_the_whole_one(size):
    assert_ranks_agree(
        lambda shard: create_attention(shard)(X, STREAM, dense_attention, NORM)[1], size=size
    )


@pytest.mark.parametrize("size", [2, 4, 7])
def test_embedding_of_all_ranks_is_the_whole_one(size):
    ids = torch.tensor([0, 172, 173, 344, 1])
    assert_ranks_agree(lambda shard: create_embedding(shard)(ids), size=size)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_all_ranks_are_the_whole_ones_without_padding(size):
    assert create_embedding(Shard()).compute_logits(X).shape == (5, 345)
    assert_ranks_agree(lambda shard: create_embedding(shard).compute_logits(X), size=size)


def test_padding_rows_are_zero_and_never_looked_up():
    last = VocabParallelEmbedding(5, 8, shard=Shard(rank=3, size=4))
    assert (last.num_used_rows, last.num_padding_elements) == (0, 16)
    assert not last.matrix.weight.any()


def test_heads_are_dealt_in_groups_with_their_kv_head():
    splits = [split_heads(8, 4, Shard(rank, 2)) for rank in range(2)]
    assert splits == [
        HeadSplit(heads=Span(0, 4, 8), kv_heads=Span(0, 2, 4)),
        HeadSplit(heads=Span(4, 4, 8), kv_heads=Span(2, 2, 4)),
    ]


def test_kv_heads_are_copied_when_ranks_outnumber_them():
    splits = [split_heads(9, 3, Shard(rank, 9)) for rank in range(9)]
    assert [split.kv_heads.start for split in splits] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {split.kv_heads.length for split in splits} == {1}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "numbers"),
    [(9, 3, 2, (9, 2)), (12, 3, 2, (3, 2)), (12, 3, 4, (3, 4)), (4, 2, 8, (4, 8))],
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(heads, kv_heads, size, numbers):
    with pytest.raises(ConfigError) as refusal:
        split_heads(heads, kv_heads, Shard(0, size))
    count, ranks = numbers
    assert f"the model's {count} " in str(refusal.value)
    assert f"tensor_parallel_size {ranks};" in str(refusal.value)


def test_tensor_parallel_size_can_be_checked_before_anything_starts():
    check_tensor_parallel(CONFIG, 4)
    with pytest.raises(ConfigError, match=r"4 attention heads .* 3;"):
        check_tensor_parallel(CONFIG, 3)
