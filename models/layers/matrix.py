"""The weight of a linear layer in the form in which its device multiplies with it."""

from torch import Tensor, nn

from octavo.models.layers.weights import empty_parameter
from octavo.models.ops.linear import PackedWeight, can_pack, linear


class Matrix(nn.Module):
    """A weight, (out_features, in_features), that a loader writes and then may be packed.

    Packing drops ``weight``, unless somebody else reads it too; it must not be written any more.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self._packed: PackedWeight | None = None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        if self._packed is not None:
            return self._packed.linear(x, bias)
        return linear(x, self.weight, bias)

    def pack(self, *, keep_weight: bool = False) -> None:
        """Bring the weight into a faster form, where this machine has one for its type."""
        if self._packed is not None or not can_pack(self.weight):
            return
        self._packed = PackedWeight(self.weight)
        if not keep_weight:
            del self.weight
