"""The weight of a linear layer in the form in which its device multiplies with it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.models.layers.weights import CheckpointTensor, empty_parameter
from octavo.models.ops.eight_bits import spread_nan
from octavo.models.ops.linear import (
    PackedWeight,
    can_pack,
    gate,
    linear,
    linear_add_norm,
    linear_silu_mul,
)
from octavo.models.ops.norm import Norm, Normed

ALL_ROWS = slice(None)


class PackedForm(Protocol):
    """A weight in a form of its own; made from the weight, which it does not need any more."""

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features), in a type of its choice."""


class Matrix(nn.Module):
    """A weight, (out_features, in_features), that a loader writes and then may be packed.

    One that is ``rounded_to`` a type of 8 bits has a ``scale`` for each output: what is multiplied
    with is ``weight * scale[:, None]``. Packing drops ``weight``, unless somebody else reads it
    too; it must not be written any more.
    """

    def __init__(
        self, out_features: int, in_features: int, *, rounded_to: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=rounded_to)
        has_scale = rounded_to is not None
        self.scale = empty_parameter(out_features, dtype=torch.float32) if has_scale else None
        self._packed: PackedForm | None = None

    def forward(self, x: Tensor | Normed, bias: Tensor | None = None) -> Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        if self._packed is not None:
            assert isinstance(x, Tensor), "nothing is folded on a CPU"
            return self._packed.linear(x, bias)
        return linear(x, self.weight, bias, scale=self.scale)

    def silu_mul(self, x: Tensor | Normed, bias: Tensor | None = None) -> Tensor:
        """Map (num_rows, in_features) to silu(gate) * up, half as wide, of the output gate | up."""
        if self._packed is not None:
            return gate(self(x, bias))
        return linear_silu_mul(x, self.weight, bias, scale=self.scale)

    def add_norm(
        self, x: Tensor, bias: Tensor | None, *, residual: Tensor, norm: Norm
    ) -> tuple[Tensor | Normed, Tensor] | None:
        """Return the normalised sum of output and ``residual``, and the sum, if that saves work.

        ``residual`` may be overwritten.
        """
        if self._packed is not None:
            return None
        return linear_add_norm(x, self.weight, bias, scale=self.scale, residual=residual, norm=norm)

    @property
    def product(self) -> Callable[..., Tensor]:
        """What ``forward`` comes to, for frequent calls; valid until the weight is packed."""
        return self.forward if self._packed is None else self._packed.linear

    @property
    def packed(self) -> PackedForm | None:
        """The form that the weight was brought into."""
        return self._packed

    @property
    def is_packed(self) -> bool:
        """Whether the weight has a form of its own already."""
        return self._packed is not None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Bring the weight into a faster form, where this machine has one for its type."""
        if self.scale is not None and self.weight.device.type == "cpu":
            spread_nan(self.weight, self.scale)
        if not self.is_packed and can_pack(self.weight):
            self.pack_as(PackedWeight(self.weight), keep_weight=keep_weight)

    def pack_as(self, form: PackedForm, *, keep_weight: bool = False) -> None:
        """Multiply with this form of the weight from now on."""
        assert not self.is_packed, "a packed weight is not packed again"
        self._packed = form
        if not keep_weight:
            del self.weight

    def checkpoint_tensor(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: slice = ALL_ROWS,
        dim: int = 0,
        start: int = 0,
    ) -> CheckpointTensor:
        """Name the tensor, of this shape, that fills these rows, from ``start`` along ``dim``."""
        scale = None if self.scale is None else self.scale[rows]
        return CheckpointTensor(name, shape, self.weight[rows], dim=dim, start=start, scale=scale)
