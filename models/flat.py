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

from octavo.attention.backend import Attention, AttentionLayer
from octavo.attention.cpu_backend import CpuAttention
from octavo.models.causal_lm import CausalLM
from octavo.models.fused import FusedLayers, FusedOps
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.norm import RMSNorm
from octavo.models.ops.linear import gate

Linear = Callable[[Tensor], Tensor]

MANY_ROWS = 64
"""So many rows are multiplied as any larger number."""


@dataclass(frozen=True, slots=True)
class LayerOps:
    """What a layer computes between its products."""

    add_norm: Callable[[Tensor, Tensor, "FlatNorm"], Tensor]
    """Add the second to the first, (num_rows, hidden_size), and return that normalised."""
    silu_mul: Callable[[Tensor], Tensor]
    """Map gate | up, which may be overwritten, to silu(gate) * up, (num_rows, size)."""


class FlatNetwork:
    """Computes what the network does, with its weights; they must not be packed afterwards."""

    def __init__(self, model: CausalLM) -> None:
        assert model.shard.size == 1, "a shard of a network is not flattened"
        self.network = model
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._first_norm, *next_norms = [FlatNorm(layer.input_layernorm) for layer in layers]
        self._layers = list(map(_flatten, layers, (*next_norms, None)))
        self._embed = model.embed_tokens.forward
        self._last_norm = FlatNorm(model.norm)
        self._ops: dict[torch.dtype, LayerOps] = {}
        self._fused: dict[int, FusedLayers] = {}

    def use(self, dtype: torch.dtype, ops: LayerOps) -> None:
        """Call these from now on where products give this type, and nothing is fused."""
        self._ops[dtype] = ops

    def fuse(self, ops: FusedOps, *, max_rows: int) -> None:
        """Call these from now on for up to so many rows, fewest first."""
        self._fused[max_rows] = FusedLayers(self.network, ops)
        self._fused = dict(sorted(self._fused.items()))

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """What the backend knows of each layer."""
        return [layer.attention for layer in self._layers]

    def find_product_types(self) -> list[torch.dtype]:
        """Return the types that products give, first that of one row."""
        weight = self._first_norm.weight
        inputs = [weight.new_zeros(num_rows, len(weight)) for num_rows in (1, MANY_ROWS)]
        return list(dict.fromkeys(self._layers[0].qkv(x).dtype for x in inputs))

    def __call__(
        self, input_ids: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Map (num_tokens,) ids to normalised hidden states, (num_tokens or n, hidden_size), of all
        tokens or of ``wanted``, (n,) indices of rows' last tokens, at least one.
        """
        total = self._embed(input_ids)
        x = self._first_norm(total)
        if isinstance(attention, CpuAttention) and attention.stores_all:
            num_wanted = len(x) if wanted is None else len(wanted)
            compute, last = self._find_fused(len(x)), self._find_fused(num_wanted)
            if compute is not None and last is not None:
                return compute(x, total, attention, wanted, last)
        for layer in self._layers:
            x = attention(layer.attention, layer.qkv(x))
            if wanted is not None and layer.next_norm is None:
                x, total = x.index_select(0, wanted), total.index_select(0, wanted)
            x = layer.output(x)
            ops = self._ops.get(x.dtype, PLAIN)
            x = ops.add_norm(total, x, layer.mlp_norm)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            if layer.next_norm is not None:
                x = ops.add_norm(total, x, layer.next_norm)
        total += x
        return self._last_norm(total)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) in the model's type."""
        return self.network.compute_logits(hidden)

    def _find_fused(self, num_rows: int) -> FusedLayers | None:
        fitting = (fused for max_rows, fused in self._fused.items() if num_rows <= max_rows)
        return next(fitting, None)


class FlatNorm:
    """RMSNorm, in float32 in fewer passes over the rows than torch takes.

    The root of a row's mean square and eps is, but for a factor, the hypotenuse of the row's length
    and of a constant.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self.weight, self._eps = norm.weight, norm.eps
        self._is_wide = norm.weight.dtype == torch.float32
        factor = math.sqrt(norm.weight.numel())
        self._factors, self._shortest = norm.weight * factor, torch.tensor(factor * norm.eps**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise rows, (num_rows, hidden_size)."""
        if not self._is_wide:  # torch computes these in float32, too
            return torch.rms_norm(x, self.weight.shape, self.weight, self._eps)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).hypot_(self._shortest)
        return (x * self._factors).mul_(length.reciprocal_())


def _add_norm(total: Tensor, x: Tensor, norm: FlatNorm) -> Tensor:
    total += x
    return norm(total)


PLAIN = LayerOps(_add_norm, gate)


@dataclass(frozen=True, slots=True)
class _FlatLayer:
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: FlatNorm
    gate_up: Linear
    down: Linear
    next_norm: FlatNorm | None
    """The next layer's first."""


def _flatten(layer: DecoderLayer, next_norm: FlatNorm | None) -> _FlatLayer:
    return _FlatLayer(
        qkv=_bind(layer.self_attn.qkv_proj),
        attention=layer.self_attn.layer,
        output=_bind(layer.self_attn.o_proj),
        mlp_norm=FlatNorm(layer.post_attention_layernorm),
        gate_up=_bind(layer.mlp.gate_up_proj),
        down=_bind(layer.mlp.down_proj),
        next_norm=next_norm,
    )


def _bind(linear: ColumnParallelLinear | RowParallelLinear) -> Linear:
    product, bias = linear.matrix.product, linear.bias
    if bias is None:
        return product
    if isinstance(linear, RowParallelLinear):  # adds its bias to what was rounded
        return lambda x: product(x) + bias
    return lambda x: product(x, bias)
