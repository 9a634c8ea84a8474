"""What builds each network of ``config.ARCHITECTURES``."""

from collections.abc import Callable

from octavo.models.causal_lm import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.layers.parallel import Shard, split_heads
from octavo.models.llama import build_llama
from octavo.models.mistral import build_mistral
from octavo.models.qwen2 import build_qwen2
from octavo.models.qwen3 import build_qwen3

BuildModel = Callable[[ModelConfig, Shard], CausalLM]

_BUILDERS: dict[str, BuildModel] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
}


def get_builder(config: ModelConfig) -> BuildModel:
    """Return what builds the network."""
    return _BUILDERS[config.architecture]


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Check that ``size`` ranks can share the network, before any process starts.

    Raises:
        ConfigError: its heads cannot be dealt out; the message has both numbers.
    """
    split_heads(config.num_heads, config.num_kv_heads, Shard(rank=0, size=size))
