"""Root-mean-square normalisation, with the residual sum in front of it."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from octavo.models.layers.weights import CheckpointTensor, empty_parameter
from octavo.models.ops.norm import Norm, add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Add to the residual stream, then normalise it: one pass over the data for a fused kernel."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    @property
    def norm(self) -> Norm:
        """What a product needs that folds the norm."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalised sum of ``x`` and ``residual``, and the sum; shapes are equal."""
        if x.is_cuda:
            if residual is None:
                return rms_norm(x, self.weight, eps=self.eps), x
            return add_rms_norm(x, residual, self.weight, eps=self.eps)
        total = x if residual is None else x + residual
        return functional.rms_norm(total, self.weight.shape, self.weight, self.eps), total

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the weight; every rank holds it whole."""
        yield CheckpointTensor(f"{name}.weight", tuple(self.weight.shape), self.weight)
