"""GGUF files: llama.cpp's names, layouts and block formats turned into those of the networks here.

Weights are dequantised while they are loaded; the gguf package knows the block formats.
"""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError, ModelLoadError
from octavo.models.config import GenerationConfig, ModelConfig
from octavo.models.fields import MAX_LAYERS, Fields
from octavo.models.gguf_header import GGUFHeader, GGUFTensorInfo
from octavo.models.rope import RopeConfig, compute_yarn_attention_factor

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_ROW_ELEMENTS = 1 << 16  # a multiple of every format's block
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFCheckpoint:
    """The tensors of one GGUF file under their Hugging Face names.

    Raises:
        ModelLoadError: the file is cut, or a tensor has a format or a name that is unknown.
        ConfigError: the gguf package is not installed.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.name = str(header.path)
        self._gguf = _import_gguf()
        self._data = np.memmap(header.path, mode="r")
        self._infos = {
            _translate(name): info
            for name, info in header.tensors.items()
            if name != _ROPE_DIVISORS
        }
        self._heads = _permuted_heads(header)
        for info in self._infos.values():
            self._check(info)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: info.shape for name, info in self._infos.items()}

    def read(self, name: str) -> Tensor:
        """Dequantise one tensor: float32, on the CPU."""
        info = self._infos[name]
        stored = self._data[info.offset : info.offset + self._num_bytes(info)]
        # The package works in groups of 16 rows: long rows make three times the speed of real ones.
        num_elements = math.prod(info.shape)
        rows = stored.reshape(num_elements // math.gcd(num_elements, _ROW_ELEMENTS), -1)
        values = self._gguf.dequantize(rows, self._gguf.GGMLQuantizationType(info.type_id))
        tensor = torch.from_numpy(np.require(values, requirements="W")).reshape(info.shape)
        for suffix, num_heads in self._heads.items():
            if suffix in name:
                return _undo_permutation(tensor, num_heads)
        return tensor

    def _check(self, info: GGUFTensorInfo) -> None:
        kinds = self._gguf.GGML_QUANT_SIZES
        if info.type_id not in kinds or info.shape[-1] % kinds[info.type_id][0]:
            raise ModelLoadError(
                f"tensor {info.name} of {self.name} has the unknown format {info.type_id}"
                f" for its shape {info.shape}"
            )
        end = info.offset + self._num_bytes(info)
        if end > len(self._data):
            raise ModelLoadError(
                f"{self.name} is cut: tensor {info.name} ends at byte {end} of {len(self._data)}"
            )

    def _num_bytes(self, info: GGUFTensorInfo) -> int:
        block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[info.type_id]
        return int(math.prod(info.shape) // block_size * block_bytes)


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


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "GGUF files need the gguf package; install it with: pip install octavo[demo]"
        ) from error
    module: ModuleType = gguf
    return module


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
    if _ROPE_DIVISORS in header.tensors:
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
    info = header.tensors[_ROPE_DIVISORS]
    (count,) = info.shape
    values = np.fromfile(header.path, dtype="<f4", count=count, offset=info.offset)
    return tuple(values.tolist())


def _translate(name: str) -> str:
    """Map blk.0.attn_q.weight to model.layers.0.self_attn.q_proj.weight, and so on."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match stem.split("."):
        case ["blk", index, part] if part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _permuted_heads(header: GGUFHeader) -> dict[str, int]:
    """Return part of a name -> number of heads, for the matrices whose rows llama.cpp reorders."""
    if header.metadata["general.architecture"] != "llama":
        return {}
    num_heads = header.metadata["llama.attention.head_count"]
    num_kv_heads = header.metadata.get("llama.attention.head_count_kv", num_heads)
    return {".q_proj.": num_heads, ".k_proj.": num_kv_heads}


def _undo_permutation(tensor: Tensor, num_heads: int) -> Tensor:
    """Put the rows of each head from rotation pairs (0, 1), (2, 3), ... back to (i, i + dim/2)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
