"""A packed network as a list of plain functions, for a CPU, where calling a layer costs time, too.

``CausalLM`` is the network; this runs its layers in one loop, without modules inside modules: a
module's call and each look-up of a part of it take as long as a small operation, and a decode step
of one row has hundreds of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.backend import Attention, AttentionLayer
from octavo.models.causal_lm import CausalLM
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear

Linear = Callable[[Tensor], Tensor]


class FlatNetwork:
    """Computes what the network does, with its weights; they must not be packed afterwards."""

    def __init__(self, model: CausalLM) -> None:
        assert model.shard.size == 1, "a shard of a network is not flattened"
        self.network = model
        self._layers = [_flatten(layer) for layer in model.layers]
        self._embed = model.embed_tokens.forward
        self._norm, self._eps = model.norm.weight, model.norm.eps

    def __call__(self, input_ids: Tensor, attention: Attention) -> Tensor:
        """Map (num_tokens,) ids to normalised hidden states, (num_tokens, hidden_size)."""
        total, eps = self._embed(input_ids), self._eps
        size = self._norm.shape
        for layer in self._layers:
            x = torch.rms_norm(total, size, layer.input_norm, eps)
            x = layer.output(attention(layer.attention, layer.qkv(x)))
            total = total + x
            x = torch.rms_norm(total, size, layer.mlp_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            total = total + layer.down(functional.silu(gate, inplace=True).mul_(up))
        return torch.rms_norm(total, size, self._norm, eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) in the model's type."""
        return self.network.compute_logits(hidden)


@dataclass(frozen=True, slots=True)
class _FlatLayer:
    input_norm: Tensor
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def _flatten(layer: object) -> _FlatLayer:
    assert isinstance(layer, DecoderLayer)
    return _FlatLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_bind(layer.self_attn.qkv_proj),
        attention=layer.self_attn.layer,
        output=_bind(layer.self_attn.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_bind(layer.mlp.gate_up_proj),
        down=_bind(layer.mlp.down_proj),
    )


def _bind(linear: ColumnParallelLinear | RowParallelLinear) -> Linear:
    product, bias = linear.matrix.product, linear.bias
    if bias is None:
        return product
    if isinstance(linear, RowParallelLinear):  # adds its bias to what was rounded
        return lambda x: product(x) + bias
    return lambda x: product(x, bias)
