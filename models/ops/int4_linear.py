"""Products with weights of four bits on a CPU, activations in bfloat16.

Every 32 inputs of an output share a scale and an offset, which is how GGUF's Q4_1 stores them: such
a weight is kept as it is, but for the rounding of its scales to bfloat16. Few rows read it in four
bits; more rows, which are bound by arithmetic, multiply with a bfloat16 copy, or with a float32 one
of the same values where the CPU does not multiply bfloat16 itself. Where the CPU has matrix units
(AMX) there are tiles, too: four bits in the order in which compiled products read them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.models.ops.linear import PackedWeight, can_pack

GROUP_SIZE = 32
LARGEST = 15
MIDDLE = 8
"""What the stored offset belongs to."""
OUT_MULTIPLE = 16
MAX_ROWS = 8
"""Rows that torch multiplies in four bits: a step of 8 then takes 0.73 of the time, of 16 1.15."""
TILE_WIDTH = 32
"""Outputs that matrix units multiply together."""


PARTS = ("values", "scales", "rounded", "tiles")


def round_to_int4(weight: Tensor) -> dict[str, Tensor]:
    """Round a weight to sixteen levels a group; return the ``PARTS`` that it is packed of.

    Of one torch and one kind of CPU: ``values`` lie as torch's operator reads them here.
    """
    values, scales, offsets = quantize_groups(weight.detach().float())
    packed = torch._convert_weight_to_int4pack_for_cpu(values.flatten(1).int(), 1)
    tiles = pack_tiles(values.flatten(1).byte()) if has_tiles(len(values)) else packed.new_empty(0)
    pairs = torch.stack((scales, offsets + MIDDLE * scales), dim=-1)  # (out, groups, 2)
    rounded = values.mul_(scales[..., None]).add_(offsets[..., None])
    return {
        "values": packed,
        "scales": pairs.transpose(0, 1).contiguous().bfloat16(),
        "rounded": rounded.flatten(1).bfloat16(),
        "tiles": tiles,
    }


def pack_tiles(values: Tensor) -> Tensor:
    """Bring levels, (out, in) uint8, into the order in which inductor's product for AMX reads them.

    Of ``TILE_WIDTH`` outputs and one input the first half lies in the low bits of bytes, the second
    in their high bits; (out, in / 2).
    """
    blocks = values.unflatten(0, (-1, 2, TILE_WIDTH // 2))  # (out / 32, 2, 16, in)
    pairs: Tensor = blocks[:, 0] | blocks[:, 1] << 4
    return pairs.transpose(1, 2).reshape(len(values), -1)


def has_tiles(out_features: int) -> bool:
    """Return whether this CPU has matrix units for bfloat16, and such a weight fits them."""
    return torch.cpu._is_amx_tile_supported() and out_features % TILE_WIDTH == 0


class Int4Weight:
    """A weight rounded to sixteen levels a group, of its parts; ``rounded`` is not kept."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.values, self.scales, self.tiles = (
            parts[part] for part in ("values", "scales", "tiles")
        )
        self._many_type = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        self._many = PackedWeight(parts["rounded"].to(self._many_type))

    @property
    def has_tiles(self) -> bool:
        """Whether this CPU has matrix units, and the weight fits them."""
        return self.tiles.numel() > 0

    def get_operands(self, with_tiles: bool) -> tuple[Tensor, Tensor]:
        """Return what a product reads: levels, (out, in / 2), and scales."""
        return self.tiles if with_tiles else self.values, self.scales

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, (num_rows, out_features), in the type computed in.

        x is (num_rows, in_features) of any float type, and rounded to that type: bfloat16, but for
        many rows on a CPU that does not multiply it.
        """
        if x.shape[0] <= MAX_ROWS:
            rounded = x.bfloat16().contiguous()
            y = torch._weight_int4pack_mm_for_cpu(rounded, self.values, GROUP_SIZE, self.scales)
        else:
            y = self._many.linear(x.to(self._many_type).contiguous())
        return y if bias is None else y.add_(bias)


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, (out, groups, 32) from 0 to 15, scales and offsets, (out, groups), float32.

    The least and the largest weight of a group are levels 0 and 15, as in Q4_1: what was stored so
    comes back.
    """
    groups = weight.view(len(weight), -1, GROUP_SIZE)
    offsets = groups.amin(dim=-1)  # aminmax takes four times as long as both
    scales = (groups.amax(dim=-1) - offsets) / LARGEST
    steps = torch.where(scales > 0, scales, 1)
    values = (groups - offsets[..., None]).div_(steps[..., None]).round_()
    return values, scales, offsets


def can_quantize() -> bool:
    """Return whether torch multiplies four bits with vectors on this CPU."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_vectors and can_pack(torch.empty(0))


def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 itself."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def fits(out_features: int, in_features: int) -> bool:
    """Return whether torch's operators take a weight of this shape."""
    return out_features % OUT_MULTIPLE == 0 and in_features % GROUP_SIZE == 0
