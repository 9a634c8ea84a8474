"""What a GGUF file's metadata says of its network and of its sampling defaults. No torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import ModelLoadError
from octavo.models.config import GenerationConfig, ModelConfig
from octavo.models.fields import MAX_LAYERS, Fields
from octavo.models.gguf_header import GGUFHeader, GGUFTensorInfo
from octavo.models.rope import RopeConfig, compute_yarn_attention_factor

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that is no weight: what rotation frequencies are divided by."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def parse_gguf_config(header: GGUFHeader) -> ModelConfig:
    """Build the config from a file's metadata.

    Raises:
        ConfigError: a field is missing, malformed or asks for something unsupported.
    """
    general = Fields(header.metadata, origin=str(header.path))
    family = general.text("general.architecture")
    if family not in _ARCHITECTURES:
        raise general.refuse("general.architecture", f"supported are {', '.join(_ARCHITECTURES)}")
    fields = _below(header, family + ".")
    tokenizer = _below(header, "tokenizer.ggml.")
    for name in ("expert_count", "attention.sliding_window"):
        if fields.count(name, default=0, low=0):
            raise fields.refuse(name, "this is not supported in GGUF files")
    hidden_size = fields.count("embedding_length")
    num_heads = fields.count("attention.head_count")
    num_layers = fields.count("block_count", high=MAX_LAYERS)
    _find(header, f"blk.{num_layers - 1}.attn_q.weight")
    head_dim = fields.count("attention.key_length", default=hidden_size // num_heads)
    rope = _parse_rope(header, fields, head_dim)
    return ModelConfig(
        architecture=_ARCHITECTURES[family],
        vocab_size=_find(header, "token_embd.weight").shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", above=0),
        rope=rope,
        max_position_embeddings=rope.stretch(fields.count("context_length")),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        sliding_windows=(None,) * num_layers,
        bos_token_id=next(iter(tokenizer.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(tokenizer),
        dtype="bfloat16",
    )


def parse_gguf_generation_config(header: GGUFHeader) -> GenerationConfig:
    """Return the EOS ids; a GGUF file has no sampling defaults."""
    return GenerationConfig(eos_token_ids=_eos_token_ids(_below(header, "tokenizer.ggml.")))


def _below(header: GGUFHeader, prefix: str) -> Fields:
    fields: Mapping[str, Any] = {
        name.removeprefix(prefix): value
        for name, value in header.metadata.items()
        if name.startswith(prefix)
    }
    return Fields(fields, origin=f"{prefix}* in {header.path}")


def _find(header: GGUFHeader, name: str) -> GGUFTensorInfo:
    if name not in header.tensors:
        raise ModelLoadError(f"{header.path} lacks the tensor {name}")
    return header.tensors[name]


def _eos_token_ids(tokenizer: Fields) -> tuple[int, ...]:
    ids = [token for name in _EOS_FIELDS for token in tokenizer.token_ids(name)]
    return tuple(dict.fromkeys(ids))


def _parse_rope(header: GGUFHeader, fields: Fields, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", default=10_000.0, above=0)
    if fields.count("rope.dimension_count", default=head_dim) != head_dim:
        raise fields.refuse("rope.dimension_count", f"only the head's {head_dim} is supported")
    if ROPE_DIVISORS in header.tensors:
        return RopeConfig(kind="divisors", theta=theta, divisors=_read_divisors(header))
    match fields.text("rope.scaling.type", default="none"):
        case "none":
            return RopeConfig(theta=theta)
        case "linear":
            factor = fields.number("rope.scaling.factor", above=0)
            return RopeConfig(kind="linear", theta=theta, factor=factor)
        case "yarn":
            factor = fields.number("rope.scaling.factor", above=0)
            scale = fields.number("rope.scaling.attn_factor", default=1.0)
            return RopeConfig(
                kind="yarn",
                theta=theta,
                factor=factor,
                original_max_positions=fields.count("rope.scaling.original_context_length"),
                attention_factor=scale * compute_yarn_attention_factor(factor),
            )
    raise fields.refuse("rope.scaling.type", "supported are none, linear and yarn")


def _read_divisors(header: GGUFHeader) -> tuple[float, ...]:
    info = header.tensors[ROPE_DIVISORS]
    (count,) = info.shape
    values = np.fromfile(header.path, dtype="<f4", count=count, offset=info.offset)
    return tuple(values.tolist())
