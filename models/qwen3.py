"""Qwen3: Llama's network with normalised query and key heads."""

from octavo.models.causal_lm import CausalLM, build_dense
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle
from octavo.models.layers.parallel import Shard


def build_qwen3(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build layers that RMS-normalise each query and key head before rotating it.

    ``attention_bias`` covers all four projections.
    """
    bias = config.attention_bias
    style = AttentionStyle(qkv_bias=bias, output_bias=bias, has_head_norm=True)
    return build_dense(config, shard, style)
