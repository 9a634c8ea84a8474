"""Checkpoints whose matrices are stored in 8-bit floats, each with a scale beside it.

``X.weight`` in e4m3 has the factor ``X.weight_scale`` or, in spite of the name,
``X.weight_scale_inv``: one number, one for each output, or one for each block of outputs and
inputs. Those of activations (``X.input_scale``) are not needed: they are found for each token.
"""

from torch import Tensor

from octavo.errors import ModelLoadError
from octavo.models.ops.eight_bits import FP8, dequantize_rows
from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

_SCALES = ("_scale", "_scale_inv")


class Fp8Checkpoint:
    """The tensors of ``stored`` by the names of plain ones; scales are part of their matrix.

    Raises:
        ModelLoadError: a matrix lacks its scale, or the scale has an unknown shape.
    """

    def __init__(self, stored: SafetensorsCheckpoint, block: tuple[int, int] | None) -> None:
        self.name = stored.name
        self._stored = stored
        self._block = block
        self._shapes = dict(stored.shapes())
        self._scales: dict[str, str] = {}
        for name in stored.shapes():
            if stored.read(name).dtype == FP8:
                self._scales[name] = self._take_scale(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor but scales."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return one tensor whole, on the CPU; a quantised one is dequantised to float32."""
        values = self._stored.read(name)
        if name not in self._scales:
            return values
        scale = self._stored.read(self._scales[name]).float()
        if self._is_by_block(name):
            assert self._block is not None, "the shape was checked"
            for dim, size in enumerate(self._block):
                scale = scale.repeat_interleave(size, dim)[: values.shape[0]]
                scale = scale[:, : values.shape[1]]
            return values.float().mul_(scale)
        return dequantize_rows(values, scale.flatten().expand(len(values)), scale.dtype)

    def read_fp8(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return e4m3 (n, k) and scales (n,) as they are stored; None if they are not so."""
        if name not in self._scales or self._is_by_block(name):
            return None
        values = self._stored.read(name)
        scale = self._stored.read(self._scales[name]).float()
        return values, scale.flatten().expand(len(values))

    def _take_scale(self, name: str) -> str:
        """Return the name of a matrix' scale, and hide what stands beside the matrix."""
        shapes = self._stored.shapes()
        found = [name + suffix for suffix in _SCALES if name + suffix in shapes]
        if len(found) != 1:
            raise ModelLoadError(f"tensor {name} of {self.name} is fp8 and has no weight_scale")
        shape = shapes[name]
        (scale,) = found
        known = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
        if self._block is not None:
            known.append((-(-shape[0] // self._block[0]), -(-shape[-1] // self._block[1])))
        if len(shape) != 2 or shapes[scale] not in known:
            raise ModelLoadError(
                f"tensor {scale} of {self.name} has shape {shapes[scale]}, which does not fit"
                f" {shape}: supported are one scale a matrix, a row or a block of {self._block}"
            )
        for hidden in (scale, name.removesuffix("weight") + "input_scale"):
            self._shapes.pop(hidden, None)
        return scale

    def _is_by_block(self, name: str) -> bool:
        num_rows = self._shapes[name][0]
        shape = self._stored.shapes()[self._scales[name]]
        return shape not in ((), (1,), (1, 1), (num_rows,), (num_rows, 1))
