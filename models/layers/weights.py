"""The border between layers and loaders: which part of which checkpoint tensor goes where."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, and the part of it that this rank keeps.

    ``target`` is a view into a parameter: it receives ``target.shape[dim]`` entries along ``dim``,
    from ``start`` on. With ``scale``, a float32 for each of its rows, target is quantised: a row is
    target times scale. Names are those of the Hugging Face checkpoints.
    """

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    target: Tensor
    dim: int = 0
    start: int = 0
    scale: Tensor | None = None

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the view of the checkpoint's tensor that belongs into ``target``."""
        return whole.narrow(self.dim, self.start, self.target.shape[self.dim])

    def scale_part_of(self, whole: Tensor) -> Tensor:
        """Return the view of the scales of all rows that belongs into ``scale``."""
        return self.part_of(whole) if self.dim == 0 else whole

    @property
    def num_elements(self) -> int:
        """Elements of parameters that are written."""
        return self.target.numel() + (0 if self.scale is None else self.scale.numel())


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return memory for a weight that a loader must fill, of torch's default device and type."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
