"""Weights of GGUF files: llama.cpp's names, layouts and block formats turned into those used here.

Weights are dequantised while they are loaded; the gguf package knows the block formats.
"""

import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError, ModelLoadError
from octavo.models.gguf_config import ROPE_DIVISORS
from octavo.models.gguf_header import GGUFHeader, GGUFTensorInfo

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
_ROW_ELEMENTS = 1 << 16  # a multiple of every format's block


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
            _translate(name): info for name, info in header.tensors.items() if name != ROPE_DIVISORS
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


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "GGUF files need the gguf package; install it with: pip install octavo[demo]"
        ) from error
    module: ModuleType = gguf
    return module


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
