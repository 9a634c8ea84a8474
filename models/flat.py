"""A packed network as a list of plain functions, for a CPU, where calling a layer costs time, too.

``CausalLM`` is the network; this runs its layers in one loop, without modules inside modules: a
module's call and each look-up of a part of it take as long as a small operation, and a decode step
of one row has hundreds of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.backend import Attention, AttentionLayer
from octavo.models.causal_lm import CausalLM
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.norm import RMSNorm

Linear = Callable[[Tensor], Tensor]


class FlatNetwork:
    """Computes what the network does, with its weights; they must not be packed afterwards."""

    def __init__(self, model: CausalLM) -> None:
        assert model.shard.size == 1, "a shard of a network is not flattened"
        self.network = model
        self._layers = [_flatten(layer) for layer in model.layers]
        self._embed = model.embed_tokens.forward
        self._norm = _flatten_norm(model.norm)

    def __call__(self, input_ids: Tensor, attention: Attention) -> Tensor:
        """Map (num_tokens,) ids to normalised hidden states, (num_tokens, hidden_size)."""
        total = self._embed(input_ids)
        for layer in self._layers:
            x = layer.output(attention(layer.attention, layer.qkv(layer.input_norm(total))))
            total += x
            gate, up = layer.gate_up(layer.mlp_norm(total)).chunk(2, dim=-1)
            total += layer.down(functional.silu(gate, inplace=True).mul_(up))
        return self._norm(total)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) in the model's type."""
        return self.network.compute_logits(hidden)


@dataclass(frozen=True, slots=True)
class _FlatLayer:
    input_norm: Linear
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: Linear
    gate_up: Linear
    down: Linear


def _flatten(layer: object) -> _FlatLayer:
    assert isinstance(layer, DecoderLayer)
    return _FlatLayer(
        input_norm=_flatten_norm(layer.input_layernorm),
        qkv=_bind(layer.self_attn.qkv_proj),
        attention=layer.self_attn.layer,
        output=_bind(layer.self_attn.o_proj),
        mlp_norm=_flatten_norm(layer.post_attention_layernorm),
        gate_up=_bind(layer.mlp.gate_up_proj),
        down=_bind(layer.mlp.down_proj),
    )


def _flatten_norm(norm: RMSNorm) -> Linear:
    """Return RMSNorm, in float32 in fewer passes over the rows than torch takes.

    The root of a row's mean square and eps is, but for a factor, the hypotenuse of the row's length
    and of a constant.
    """
    size, eps = norm.weight.shape, norm.eps
    if norm.weight.dtype != torch.float32:  # torch computes these in float32, too
        return lambda x: torch.rms_norm(x, size, norm.weight, eps)
    factor = math.sqrt(norm.weight.numel())
    weight, shortest = norm.weight * factor, torch.tensor(factor * math.sqrt(eps))

    def normalise(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).hypot_(shortest)
        return (x * weight).mul_(length.reciprocal_())

    return normalise


def _bind(linear: ColumnParallelLinear | RowParallelLinear) -> Linear:
    product, bias = linear.matrix.product, linear.bias
    if bias is None:
        return product
    if isinstance(linear, RowParallelLinear):  # adds its bias to what was rounded
        return lambda x: product(x) + bias
    return lambda x: product(x, bias)
