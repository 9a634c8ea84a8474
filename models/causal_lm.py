"""The frame that all networks here share: embedding, decoder layers, final norm, output head.

The batch is flat: tokens of all rows side by side, no batch dimension. Where each token stands is
known to the ``Attention`` of the step alone, which also rotates q and k.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from octavo.attention.backend import Attention, KVCacheSpec
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import AttentionStyle, SelfAttention
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.embedding import VocabParallelEmbedding
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.matrix import Matrix
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.parallel import Shard, split_heads
from octavo.models.layers.rotary import build_rotary_table
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.eight_bits import FP8, INT8
from octavo.models.ops.norm import Normed


class CausalLM(nn.Module):
    """A decoder-only network, or one rank's shard of it.

    Built with memory for its weights, of torch's default type and device; a loader fills what
    ``checkpoint_tensors`` names. Parameters are never replaced, only written, until ``pack``.
    """

    def __init__(self, config: ModelConfig, shard: Shard, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.config = config
        self.shard = shard
        embedding_type, head_type = _find_types(config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, shard=shard, rounded_to=embedding_type
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self._norms = (*(layer.input_layernorm for layer in layers), self.norm)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, shard=shard, rounded_to=head_type
            )
        )

    def forward(
        self, input_ids: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Map (num_tokens,) ids to normalised hidden states, (num_tokens, hidden_size).

        Of ``wanted``, (n,) indices of rows' last tokens, they are (n, hidden_size): behind the K/V
        of the last layer nothing is computed of other tokens. n is at least 1, and an index that
        is no row's last token gives anything.
        """
        x, residual = self._norms[0](self.embed_tokens(input_ids), None)
        last = len(self.layers) - 1
        for index, (layer, next_norm) in enumerate(zip(self.layers, self._norms[1:], strict=True)):
            kept = wanted if index == last else None
            x, residual = layer(x, residual, attention, next_norm, kept)
        hidden: Tensor = x.apply() if isinstance(x, Normed) else x
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) in the model's type, whole on every rank."""
        return self.lm_head.compute_logits(hidden)

    def multiply_once(self, row_counts: Iterable[int], *, max_logit_rows: int) -> None:
        """Compute each kind of product of a layer with so many rows each, and logits of up to
        ``max_logit_rows``, for nothing but the kernels: torch loads them when they are first used.
        """
        kinds = {
            (type(module), module.matrix.weight.shape, module.matrix.weight.dtype): module
            for module in self.layers.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }
        example = self.norm.weight
        for num_rows in row_counts:
            for linear in kinds.values():
                rows = example.new_empty(num_rows, linear.matrix.weight.shape[1])
                if isinstance(linear, RowParallelLinear):  # adds to the residual stream
                    stream = example.new_empty(num_rows, len(example))
                    linear.add_norm(rows, stream, self.norm)
                else:
                    linear(rows)
            if num_rows <= max_logit_rows:
                self.compute_logits(example.new_empty(num_rows, len(example)))

    def pack(self) -> None:
        """Give each matrix the form that is multiplied fastest; afterwards no weight is written.

        Matrices that this machine has no such form for stay as they are.
        """
        for module in self.layers.modules():
            if isinstance(module, Matrix):
                module.pack()
        self.lm_head.matrix.pack(keep_weight=self.lm_head is self.embed_tokens)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of the K/V that this rank keeps."""
        split = split_heads(self.config.num_heads, self.config.num_kv_heads, self.shard)
        return KVCacheSpec(
            num_layers=self.config.num_layers,
            num_kv_heads=split.kv_heads.length,
            head_dim=self.config.head_dim,
            block_size=block_size,
        )

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Name every tensor that a checkpoint must hold, once; together they fill all weights."""
        yield from self.embed_tokens.checkpoint_tensors("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}")
        yield from self.norm.checkpoint_tensors("model.norm")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.checkpoint_tensors("lm_head")


def _find_types(config: ModelConfig) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return what embedding and head are rounded to.

    A head in e4m3 costs several times what one in integers does.
    """
    if config.quantization is None or not config.quantization.vocabulary:
        return None, None
    return (INT8 if config.tie_word_embeddings else FP8), INT8


def build_dense(config: ModelConfig, shard: Shard, style: AttentionStyle) -> CausalLM:
    """Assemble a network whose layers are all alike: self-attention and a gated feed-forward.

    Raises:
        ConfigError: the network cannot be split as ``shard`` says.
    """
    rotary = build_rotary_table(
        config.rope, head_dim=config.head_dim, max_positions=config.max_position_embeddings
    )
    layers = [
        DecoderLayer(
            config,
            attention=SelfAttention(config, shard, index=index, rotary=rotary, style=style),
            mlp=GatedMLP(config, shard),
        )
        for index in range(config.num_layers)
    ]
    return CausalLM(config, shard, layers)
