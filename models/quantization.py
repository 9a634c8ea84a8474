"""Which matrices of a network are kept in 8 bits; which quantised checkpoints can be read.

A format that is not understood to the last field is refused by name before any weight is read.
No torch.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from octavo.models.fields import MAX_LAYERS, Fields

_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Matrices of the layers in e4m3 with one scale per output; norms are not.

    ``vocabulary`` is whether the output head is kept in 8-bit integers, and an embedding that is
    not the head in e4m3, each with a scale a row. ``is_stored`` is whether the checkpoint holds
    8-bit floats; with a scale for each ``block`` of so many outputs and inputs, if it says so.
    """

    vocabulary: bool
    is_stored: bool
    block: tuple[int, int] | None = None


ONLINE = Quantization(vocabulary=True, is_stored=False)
"""What ``quantization="fp8"`` makes of a checkpoint of plain floats."""


def quantize_online(stored: Quantization | None) -> Quantization:
    """Return what ``quantization="fp8"`` makes of a checkpoint: what it left is rounded, too."""
    return ONLINE if stored is None else replace(stored, vocabulary=True)


def parse_quantization(fields: Fields) -> Quantization | None:
    """Read ``quantization_config`` of a config.json; None where there is none.

    Raises:
        ConfigError: the checkpoint is quantised in a way that is not supported.
    """
    if "quantization_config" not in fields.values:
        return None
    scheme = fields.nested("quantization_config")
    num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    match scheme.text("quant_method", default="(none)"):
        case "fp8":
            return _parse_fp8(scheme, num_layers)
        case "compressed-tensors":
            return _parse_compressed(scheme, num_layers)
        case method:
            raise fields.refuse(
                "quantization_config",
                f"checkpoints quantised by {method} are not supported: those by fp8 are, and those"
                " by compressed-tensors in the format float-quantized",
            )


def _parse_fp8(scheme: Fields, num_layers: int) -> Quantization:
    """Read what Qwen, DeepSeek (with blocks) and AutoFP8 (without) write."""
    _require(scheme, "fmt", "e4m3", default="e4m3")
    if scheme.text("activation_scheme", default="dynamic") not in ("dynamic", "static"):
        raise scheme.refuse("activation_scheme", "supported are dynamic and static")
    for name in ("ignored_layers", "modules_to_not_convert"):
        _check_ignored(scheme, name, num_layers)
    block = _parse_block(scheme, "weight_block_size")
    return Quantization(vocabulary=False, is_stored=True, block=block)


def _parse_compressed(scheme: Fields, num_layers: int) -> Quantization:
    """Read what llm-compressor writes: weights and activations of all linear layers alike."""
    _require(scheme, "format", "float-quantized")
    _check_ignored(scheme, "ignore", num_layers)
    if "kv_cache_scheme" in scheme.values:
        raise scheme.refuse("kv_cache_scheme", "scales of the K/V cache are not supported")
    groups = scheme.nested("config_groups")
    if len(groups.values) != 1:
        raise scheme.refuse("config_groups", "exactly one group is supported")
    group = groups.nested(next(iter(groups.values)))
    if group.values.get("targets") != ["Linear"]:
        raise group.refuse("targets", "only ['Linear'] is supported")
    weights, inputs = group.nested("weights"), group.nested("input_activations")
    for part in (weights, inputs):
        _require(part, "type", "float")
        if part.count("num_bits") != 8:
            raise part.refuse("num_bits", "only 8 is supported")
    match weights.text("strategy"):
        case "tensor" | "channel":
            return Quantization(vocabulary=False, is_stored=True)
        case "block":
            block = _parse_block(weights, "block_structure")
            return Quantization(vocabulary=False, is_stored=True, block=block)
    raise weights.refuse("strategy", "supported are tensor, channel and block")


def _require(fields: Fields, name: str, value: str, *, default: str | None = None) -> None:
    if fields.text(name, default=default) != value:
        raise fields.refuse(name, f"only {value} is supported")


def _parse_block(fields: Fields, name: str) -> tuple[int, int] | None:
    match fields.values.get(name):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise fields.refuse(name, "it must be two sizes")


def _check_ignored(scheme: Fields, name: str, num_layers: int) -> None:
    """Check that no matrix of a layer is left as it was: all have one form."""
    ignored: Any = scheme.values.get(name, [])
    if not isinstance(ignored, list) or not all(isinstance(item, str) for item in ignored):
        raise scheme.refuse(name, "it must be a list of names")
    matrices = [f"model.layers.{i}.{part}" for i in range(num_layers) for part in _MATRICES]
    for item in ignored:
        try:
            pattern = re.compile(_make_pattern(item))
        except re.error as error:
            raise scheme.refuse(name, f"{item} is no pattern: {error}") from error
        if (matrix := next(filter(pattern.match, matrices), None)) is not None:
            raise scheme.refuse(name, f"{matrix} is left out; all matrices of layers must be fp8")


def _make_pattern(item: str) -> str:
    """Return what an entry means: a pattern behind ``re:``, or a name, of a module or around it."""
    if item.startswith("re:"):
        return item.removeprefix("re:")
    return rf"(.*\.)?{re.escape(item)}(\.|$)"
