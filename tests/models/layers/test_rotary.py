"""Rotation tables are those of transformers, for every kind of scaling."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.models.fields import Fields
from octavo.models.layers.rotary import build_rotary_table, compute_frequencies
from octavo.models.rope import RopeConfig, parse_rope
from tests.checkpoints import tiny_config

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "large theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    "yarn with its own band": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn with attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_table_is_that_of_transformers(name):
    num_positions = 3000
    config = tiny_config(head_dim=64, rope_parameters=ROPES[name])
    positions = torch.arange(num_positions)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    rope = parse_rope(
        Fields({"rope_parameters": ROPES[name], "max_position_embeddings": 512}, origin="config")
    )
    table = build_rotary_table(rope, head_dim=64, max_positions=num_positions)
    assert (table.dtype, table.shape) == (torch.float32, (num_positions, 64))
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=2e-4, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=2e-4, rtol=0)


def test_divisors_slow_each_frequency_down():
    rope = RopeConfig(kind="divisors", divisors=(1.0, 2.0, 4.0, 8.0))
    plain = compute_frequencies(RopeConfig(), 8)
    assert torch.equal(compute_frequencies(rope, 8), plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_table_is_float32_whatever_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = build_rotary_table(RopeConfig(), head_dim=8, max_positions=4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(table, build_rotary_table(RopeConfig(), head_dim=8, max_positions=4))
