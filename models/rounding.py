"""Rounds a float32 network's matrices to integers, for a CPU: ``quantization`` int4 and int8.

Between its matrices the network computes in float32; embeddings and norms are not rounded.
"""

from functools import partial
from typing import Literal

from octavo.errors import ConfigError
from octavo.models.causal_lm import CausalLM
from octavo.models.gguf_header import read_gguf_header
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.matrix import Matrix
from octavo.models.ops import int4_linear, int8_linear
from octavo.models.ops.int4_linear import Int4Weight
from octavo.models.ops.int8_linear import Int8Weight
from octavo.models.rotation import rotate_residual_stream
from octavo.models.source import ModelSource

IntegerName = Literal["int4", "int8"]

Q4_1 = 3
"""ggml's number of the format: 32 weights on 16 levels, with a scale and an offset."""


def round_network(model: CausalLM, name: IntegerName) -> None:
    """Round all matrices; afterwards no weight may be written.

    Raises:
        ConfigError: this CPU lacks the instructions, or the network's shapes do not fit them.
    """
    matrices = [module for module in model.layers.modules() if isinstance(module, Matrix)]
    _check_cpu(name, [tuple(matrix.weight.shape) for matrix in matrices])
    if name == "int4":
        _round_to_int4(model, matrices)
    else:
        _round_to_int8(model, matrices)


def can_round(name: IntegerName) -> bool:
    """Return whether this CPU has the instructions."""
    return int4_linear.can_quantize() if name == "int4" else int8_linear.can_quantize()


def _round_to_int4(model: CausalLM, matrices: list[Matrix]) -> None:
    for matrix in matrices:
        matrix.pack_as(Int4Weight)
    if int8_linear.can_quantize():  # a head in four bits costs too much
        is_tied = model.lm_head is model.embed_tokens
        model.lm_head.matrix.pack_as(partial(Int8Weight, rotates_inputs=True), keep_weight=is_tied)


def _round_to_int8(model: CausalLM, matrices: list[Matrix]) -> None:
    rotate_residual_stream(model)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        # Channels of gated activations stand out, too, with nothing to fold a rotation into.
        layer.mlp.down_proj.matrix.pack_as(partial(Int8Weight, rotates_inputs=True))
    for matrix in (*matrices, model.lm_head.matrix):
        if not matrix.is_packed:
            matrix.pack_as(Int8Weight)


def is_stored_in_int4(source: ModelSource) -> bool:
    """Return whether every matrix of the layers lies in the file as int4 keeps it."""
    if not source.is_gguf:
        return False
    tensors = read_gguf_header(source.path).tensors
    matrices = [t for n, t in tensors.items() if n.startswith("blk.") and len(t.shape) > 1]
    return all(tensor.type_id == Q4_1 for tensor in matrices)


def _check_cpu(name: IntegerName, shapes: list[tuple[int, ...]]) -> None:
    if not can_round(name):
        needed = {"int4": "AVX512-BF16", "int8": "AVX512-VNNI"}[name]
        raise ConfigError(f"quantization is {name}, which needs a CPU with {needed}: leave it out")
    if name == "int4" and (bad := [shape for shape in shapes if not int4_linear.fits(*shape)]):
        raise ConfigError(
            "quantization is int4, which needs outputs and inputs of matrices in multiples of"
            f" {int4_linear.OUT_MULTIPLE} and {int4_linear.GROUP_SIZE}; the network has one of"
            f" {bad[0]}: leave it out"
        )
