"""The border between layers and loaders: which part of which checkpoint tensor goes where."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, and the part of it that this rank keeps.

    ``target`` is a view into a parameter: it receives ``target.shape[dim]`` entries along ``dim``,
    from ``start`` on. Names are those of the Hugging Face checkpoints.
    """

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    target: Tensor
    dim: int = 0
    start: int = 0

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the view of the checkpoint's tensor that belongs into ``target``."""
        return whole.narrow(self.dim, self.start, self.target.shape[self.dim])


def empty_parameter(*shape: int) -> nn.Parameter:
    """Return memory for a weight, of torch's default type and device, that a loader must fill."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
