"""Checkpoints of one or several .safetensors files in a folder, read through a memory map."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo.models.fields import Fields

INDEX_NAME = "model.safetensors.index.json"
PLAIN_TYPES = ("F32", "F16", "BF16")
FP8_TYPES = (*PLAIN_TYPES, "F8_E4M3")


class SafetensorsCheckpoint:
    """The tensors of all files.

    Raises:
        ModelLoadError: a file is missing or cut, holds a tensor that another one holds too, or
            stores something else than ``types``.
    """

    def __init__(self, folder: Path, types: Sequence[str] = PLAIN_TYPES) -> None:
        self.name = str(folder)
        self._types = types
        self._files: dict[str, _OpenFile] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in list_safetensors(folder):
            self._add(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, in the order of the files."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return a view of the mapped file: nothing is read before its elements are used."""
        return self._files[name].get_tensor(name)

    def _add(self, path: Path) -> None:
        try:
            file: _OpenFile = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path} is not a whole safetensors file: {error}") from error
        for name in file.offset_keys():
            if name in self._files:
                raise ModelLoadError(f"tensor {name} is in {path} and in another file beside it")
            view = file.get_slice(name)
            if view.get_dtype() not in self._types:
                raise ModelLoadError(
                    f"tensor {name} of {path} is stored as {view.get_dtype()}; supported are"
                    f" {', '.join(self._types)}"
                )
            self._files[name] = file
            self._shapes[name] = tuple(view.get_shape())


class _Slice(Protocol):
    """What is used of a safetensors slice; the package has no types."""

    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _OpenFile(Protocol):
    """What is used of ``safe_open``."""

    def offset_keys(self) -> Sequence[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> Tensor: ...


def list_safetensors(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: those that its index names, else all in the folder.

    Raises:
        ModelLoadError: there is none, or one that the index names is missing.
    """
    index = folder / INDEX_NAME
    if index.exists():
        files = {str(file) for file in Fields.read(index).nested("weight_map").values.values()}
        paths = [folder / file for file in sorted(files)]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(
            f"{folder} has no .safetensors weights; other formats must be converted first"
        )
    for path in paths:
        if not path.exists():
            raise ModelLoadError(f"{path} is missing, although {index.name} names it")
    return paths
