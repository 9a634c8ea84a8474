"""What a network is: read once from the checkpoint's JSON files, then never looked up again.

Whatever is written there that Octavo cannot honour is an error here, before any weight is read.
GGUF files yield the same ``ModelConfig`` through ``models/gguf_config.py``. No torch.
"""

from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError
from octavo.models.fields import MAX_LAYERS, Fields
from octavo.models.quantization import Quantization, parse_quantization
from octavo.models.rope import RopeConfig, parse_rope

CheckpointDType = Literal["float32", "bfloat16", "float16"]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Networks that Octavo can run, by the class name in config.json; ``registry`` builds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one decoder-only network."""

    architecture: str
    vocab_size: int
    """Rows of the embedding; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """Positions the network can be used with, stretching of the context included."""
    tie_word_embeddings: bool
    attention_bias: bool = False
    """As written; an architecture that has its own rule ignores it."""
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many tokens a token sees, itself included; None is all."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Those of config.json, then those that only generation_config.json has."""
    dtype: CheckpointDType
    """Type of the stored weights, but those that are quantised."""
    quantization: Quantization | None = None
    """What is kept in fewer bits; None is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The model's own sampling defaults; None where generation_config.json is silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def parse_model_config(fields: Fields, generation: GenerationConfig) -> ModelConfig:
    """Build the config from config.json, as transformers 4 or 5 writes it.

    Raises:
        ConfigError: a field is missing, malformed or asks for something unsupported.
    """
    _refuse_unsupported(fields)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    rope = parse_rope(fields)
    eos_token_ids = (*fields.token_ids("eos_token_id"), *generation.eos_token_ids)
    return ModelConfig(
        architecture=parse_architecture(fields),
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", default=num_heads),
        head_dim=fields.count("head_dim", default=hidden_size // num_heads),
        norm_eps=fields.number("rms_norm_eps", default=1e-6, above=0),
        rope=rope,
        max_position_embeddings=rope.stretch(fields.count("max_position_embeddings")),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        sliding_windows=_parse_sliding_windows(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        dtype=_parse_dtype(fields),
        quantization=parse_quantization(fields),
    )


def parse_architecture(fields: Fields) -> str:
    """Return the one class name under ``architectures``.

    Raises:
        ConfigError: there is not one, or it is not supported; the message lists those that are.
    """
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"{fields.origin} has architectures {names!r}; it must be a list of one class name"
        )
    if names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def parse_generation_config(fields: Fields) -> GenerationConfig:
    """Build the defaults from generation_config.json."""
    return GenerationConfig(
        eos_token_ids=fields.token_ids("eos_token_id"),
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_count("top_k", low=0),
        min_p=fields.optional_number("min_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
        max_new_tokens=fields.optional_count("max_new_tokens"),
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", default="silu") not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "only silu is supported")
    if fields.number("partial_rotary_factor", default=1.0) != 1:
        raise fields.refuse("partial_rotary_factor", "only 1 is supported")
    if not fields.flag("is_causal", default=True):
        raise fields.refuse("is_causal", "only causal attention is supported")


def _parse_dtype(fields: Fields) -> CheckpointDType:
    name = "dtype" if "dtype" in fields.values else "torch_dtype"
    match fields.text(name, default="float32"):
        case "float32" | "bfloat16" | "float16" as dtype:
            return dtype
    raise fields.refuse(name, "supported are float32, bfloat16 and float16")


def _parse_sliding_windows(fields: Fields) -> tuple[int | None, ...]:
    """Apply the architecture's rule, as transformers does.

    Mistral's window is in every layer. Qwen's must be switched on and spares the first
    ``max_window_layers``. Others ignore the field.
    """
    num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    window = fields.optional_count("sliding_window")
    match parse_architecture(fields):
        case "MistralForCausalLM":
            return (window,) * num_layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" if fields.flag(
            "use_sliding_window", default=False
        ):
            kinds = _parse_layer_types(fields, num_layers)
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (None,) * num_layers


def _parse_layer_types(fields: Fields, num_layers: int) -> list[str]:
    first_layer = fields.count("max_window_layers", default=28, low=0)
    derived = [
        "sliding_attention" if index >= first_layer else "full_attention"
        for index in range(num_layers)
    ]
    kinds = fields.values.get("layer_types", derived)
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        raise fields.refuse(
            "layer_types", f"it must name full_attention or sliding_attention {num_layers} times"
        )
    return kinds
