"""Llama 1 to 3 and what shares their network, SmolLM among it."""

from octavo.models.causal_lm import CausalLM, build_dense
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle
from octavo.models.layers.parallel import Shard


def build_llama(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build pre-norm layers of rotary grouped-query attention and a gated feed-forward.

    ``attention_bias`` covers all four projections.
    """
    bias = config.attention_bias
    return build_dense(config, shard, AttentionStyle(qkv_bias=bias, output_bias=bias))
