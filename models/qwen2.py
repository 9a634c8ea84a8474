"""Qwen2 and Qwen2.5: Llama's network with a bias on queries, keys and values."""

from octavo.models.causal_lm import CausalLM, build_dense
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle
from octavo.models.layers.parallel import Shard


def build_qwen2(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build layers whose q, k and v always have a bias, whatever the config says, and o never."""
    return build_dense(config, shard, AttentionStyle(qkv_bias=True))
