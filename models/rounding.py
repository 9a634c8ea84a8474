"""Rounds a float32 network's matrices to integers, for a CPU: ``quantization`` int4 and int8.

Between its matrices the network computes in float32; embeddings and norms are not rounded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from octavo.errors import ConfigError
from octavo.models.causal_lm import CausalLM
from octavo.models.gguf_header import read_gguf_header
from octavo.models.layers.matrix import Matrix, PackedForm
from octavo.models.ops import int4_linear, int8_linear
from octavo.models.ops.int4_linear import Int4Weight, round_to_int4
from octavo.models.ops.int8_linear import Int8Weight, round_to_int8
from octavo.models.rotation import rotate_residual_stream, untie_head
from octavo.models.source import ModelSource

IntegerName = Literal["int4", "int8"]

Q4_1 = 3
"""ggml's number of the format: 32 weights on 16 levels, with a scale and an offset."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is rounded to plain tensors, its parts, and what is packed of them."""

    parts: tuple[str, ...]
    round: Callable[[Tensor], Mapping[str, Tensor]]
    pack: Callable[[Mapping[str, Tensor]], PackedForm]


INT4 = Form(int4_linear.PARTS, round_to_int4, Int4Weight)
INT8 = Form(int8_linear.PARTS, round_to_int8, Int8Weight)
ROTATED_INT8 = Form(
    int8_linear.PARTS,
    partial(round_to_int8, rotates_inputs=True),
    partial(Int8Weight, rotates_inputs=True),
)
HEAD_INT8 = replace(ROTATED_INT8, pack=partial(Int8Weight, rotates_inputs=True, is_large=True))


def round_network(
    model: CausalLM, name: IntegerName, *, copy: dict[str, Tensor] | None = None
) -> None:
    """Round all matrices; afterwards no weight may be written.

    ``copy`` receives what ``restore_network`` needs to make the same of another such network.

    Raises:
        ConfigError: this CPU lacks the instructions, or the network's shapes do not fit them.
    """
    _check_cpu(name, model)
    if name == "int8":
        rotate_residual_stream(model)
    for path, matrix, form in _choose_forms(model, name):
        parts = form.round(matrix.weight)
        if copy is not None:
            copy |= {f"{path}.{part}": parts[part] for part in form.parts}
        matrix.pack_as(form.pack(parts), keep_weight=matrix is model.embed_tokens.matrix)
    if copy is not None:
        copy |= model.named_parameters()


def restore_network(model: CausalLM, name: IntegerName, copy: Mapping[str, Tensor]) -> None:
    """Make a network whose weights are not written yet what ``round_network`` made the copy of.

    Raises:
        ConfigError: this CPU lacks the instructions that the copy's had.
    """
    _check_cpu(name, model)
    if name == "int8":
        untie_head(model)
    for path, matrix, form in _choose_forms(model, name):
        parts = {part: copy[f"{path}.{part}"] for part in form.parts}
        matrix.pack_as(form.pack(parts), keep_weight=matrix is model.embed_tokens.matrix)
    for path, parameter in model.named_parameters():
        parameter.copy_(copy[path])


def _find_matrices(model: CausalLM) -> list[tuple[str, Matrix]]:
    modules = model.layers.named_modules(prefix="layers")
    return [(path, module) for path, module in modules if isinstance(module, Matrix)]


def _choose_forms(model: CausalLM, name: IntegerName) -> Iterator[tuple[str, Matrix, Form]]:
    """Yield path, matrix and form of everything that is rounded."""
    for path, matrix in _find_matrices(model):
        # Channels of gated activations stand out, too, with nothing to fold a rotation into.
        int8 = ROTATED_INT8 if path.endswith("down_proj.matrix") else INT8
        yield path, matrix, INT4 if name == "int4" else int8
    if name == "int8":
        yield "lm_head.matrix", model.lm_head.matrix, INT8
    elif int8_linear.can_quantize():  # a head in four bits costs too much
        yield "lm_head.matrix", model.lm_head.matrix, HEAD_INT8


def can_round(name: IntegerName) -> bool:
    """Return whether this CPU has the instructions."""
    return int4_linear.can_quantize() if name == "int4" else int8_linear.can_quantize()


def is_stored_in_int4(source: ModelSource) -> bool:
    """Return whether every matrix of the layers lies in the file as int4 keeps it."""
    if not source.is_gguf:
        return False
    tensors = read_gguf_header(source.path).tensors
    matrices = [t for n, t in tensors.items() if n.startswith("blk.") and len(t.shape) > 1]
    return all(tensor.type_id == Q4_1 for tensor in matrices)


def _check_cpu(name: IntegerName, model: CausalLM) -> None:
    if not can_round(name):
        needed = {"int4": "AVX2", "int8": "AVX512-VNNI"}[name]
        raise ConfigError(f"quantization is {name}, which needs a CPU with {needed}: leave it out")
    shapes = [tuple(matrix.weight.shape) for _, matrix in _find_matrices(model)]
    if name == "int4" and (bad := [shape for shape in shapes if not int4_linear.fits(*shape)]):
        raise ConfigError(
            "quantization is int4, which needs outputs and inputs of matrices in multiples of"
            f" {int4_linear.OUT_MULTIPLE} and {int4_linear.GROUP_SIZE}; the network has one of"
            f" {bad[0]}: leave it out"
        )
