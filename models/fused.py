"""Layers with weights of four bits, each in two compiled operations around its attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from octavo.attention.cpu_backend import CpuAttention
from octavo.models.causal_lm import CausalLM
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.norm import RMSNorm
from octavo.models.ops.int4_linear import Int4Weight

NUM_WEIGHTS = 4
"""Of a layer: qkv, output, gate | up, down."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """``small_ops.project_int4`` and ``finish_int4``, compiled for one form of the weights."""

    project: Callable[..., Tensor]
    finish: Callable[..., Tensor]
    with_tiles: bool


class FusedLayers:
    """Computes what a network's layers do, with weights that ``list_int4_layers`` has found."""

    def __init__(self, model: CausalLM, ops: FusedOps) -> None:
        self._ops = ops
        layers = list_int4_layers(model)
        next_norms = [*(layer.module.input_layernorm for layer in layers[1:]), model.norm]
        self._layers = [
            (layer.module.self_attn.layer, *layer.list_inputs(norm, with_tiles=ops.with_tiles))
            for layer, norm in zip(layers, next_norms, strict=True)
        ]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        attention: CpuAttention,
        wanted: Tensor | None,
        last: "FusedLayers",
    ) -> Tensor:
        """Map the first layer's normalised inputs to the normalised hidden states.

        Both are (num_tokens, hidden_size), as is the residual stream, which is added to. Of
        ``wanted``, (n,) indices of rows' last tokens, the hidden states are (n, hidden_size);
        ``last`` are the layers for so many rows, which finish.
        """
        final = len(self._layers) - 1
        for index, (layer, qkv, others) in enumerate(self._layers):
            heads = self._ops.project(x, *qkv, *attention.find_place(layer))
            heads = attention.attend(layer, heads)
            if index < final:
                x = self._ops.finish(heads, residual, *others)
        if wanted is not None:
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
        return last.finish(heads, residual)

    def finish(self, heads: Tensor, residual: Tensor) -> Tensor:
        """Do what follows the attention of the last layer, (num_rows, num_heads * head_dim)."""
        _, _, others = self._layers[-1]
        return self._ops.finish(heads, residual, *others)


@dataclass(frozen=True, slots=True)
class Int4Layer:
    """A layer and its ``NUM_WEIGHTS``."""

    module: DecoderLayer
    weights: tuple[Int4Weight, ...]

    def list_inputs(
        self, next_norm: RMSNorm, *, with_tiles: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the weights that ``project`` reads, and those that ``finish`` reads."""
        qkv, output, gate_up, down = (one.get_operands(with_tiles) for one in self.weights)
        mlp_norm = self.module.post_attention_layernorm
        return qkv, (*output, mlp_norm.weight, *gate_up, *down, next_norm.weight)


def list_int4_layers(model: CausalLM) -> list[Int4Layer]:
    """Return all layers; none if one has a bias or a weight that is not kept in four bits."""
    modules = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    layers = [Int4Layer(module, tuple(_list_weights(module))) for module in modules]
    return layers if all(len(layer.weights) == NUM_WEIGHTS for layer in layers) else []


def _list_weights(layer: DecoderLayer) -> Iterator[Int4Weight]:
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
        packed = linear.matrix.packed
        if linear.bias is None and isinstance(packed, Int4Weight):
            yield packed
