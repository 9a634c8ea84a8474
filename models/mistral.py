"""Mistral: Llama's network with a sliding window."""

from octavo.models.causal_lm import CausalLM, build_dense
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle
from octavo.models.layers.parallel import Shard


def build_mistral(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build layers that see ``config.sliding_windows`` and have no bias anywhere."""
    return build_dense(config, shard, AttentionStyle())
