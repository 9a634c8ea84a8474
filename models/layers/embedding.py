"""The vocabulary's matrix: token ids to vectors, and hidden states to logits."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.models.layers.matrix import Matrix
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.eight_bits import dequantize_rows
from octavo.models.ops.embedding import look_up


class VocabParallelEmbedding(nn.Module):
    """One row per token id; each rank holds equally many, the last rows may be padding (zeros).

    Serves as embedding, as output head, or as both when the two are tied.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        shard: Shard,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dtype = torch.get_default_dtype()
        self.shard = shard
        num_rows = -(-vocab_size // shard.size)
        self.first_row = min(shard.rank * num_rows, vocab_size)
        self.num_used_rows = min(num_rows, vocab_size - self.first_row)
        self.matrix = Matrix(num_rows, hidden_size, rounded_to=rounded_to)
        for padding in self._padding():
            padding.zero_()

    @property
    def num_padding_elements(self) -> int:
        """Weights that no checkpoint fills."""
        return sum(padding.numel() for padding in self._padding())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up (num_tokens,) ids below ``vocab_size``: (num_tokens, hidden_size)."""
        if self.shard.size == 1:
            return self._look_up(input_ids)
        row = input_ids - self.first_row
        is_mine = (row >= 0) & (row < self.num_used_rows)
        hidden = self._look_up(row * is_mine) * is_mine.unsqueeze(-1)
        return self.shard.collective.all_reduce(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) logits of the same type, whole on every rank."""
        logits = self.matrix(hidden)
        return self.shard.collective.all_gather(logits)[:, : self.vocab_size]

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the matrix and this rank's rows of it."""
        yield self.matrix.checkpoint_tensor(
            f"{name}.weight",
            (self.vocab_size, self.matrix.weight.shape[1]),
            rows=slice(self.num_used_rows),
            start=self.first_row,
        )

    def _look_up(self, rows: Tensor) -> Tensor:
        weight, scale = self.matrix.weight, self.matrix.scale
        if scale is None:
            return functional.embedding(rows, weight)
        if rows.is_cuda:
            return look_up(rows, weight, scale, self.dtype)
        values = weight.view(torch.uint8).index_select(0, rows).view(weight.dtype)
        return dequantize_rows(values, scale.index_select(0, rows), self.dtype)

    def _padding(self) -> list[Tensor]:
        return [parameter[self.num_used_rows :] for parameter in self.matrix.parameters()]
