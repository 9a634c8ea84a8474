"""Reads what stands before the tensors of a GGUF file: metadata and tensor descriptions.

Written here because start-up is a feature: the gguf package makes an array of every field, which
takes seconds for a vocabulary. The ggml repository describes the format.
"""

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError
from octavo.models.fields import Fields

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """One stored tensor; its bytes begin at ``offset`` in the file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensor descriptions; arrays are tuples."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]
    data_offset: int


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read a header; of a file that has not changed since the last call it is kept.

    Raises:
        ModelLoadError: the file is absent, is no GGUF, is cut inside its header, or is one of
            several parts.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    return _read(path, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=1)
def _read(path: Path, _version: tuple[int, ...]) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, _Cursor(data))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError) as error:
        raise ModelLoadError(f"{path} is not a whole GGUF file: {error}") from error
    if Fields(header.metadata, origin=str(path)).count("split.count", default=1, low=0) > 1:
        raise ModelLoadError(f"{path} is one part of several; merge them with llama-gguf-split")
    return header


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalars(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + codes, self.data, self.position)
        self.position += struct.calcsize("<" + codes)
        return values

    def text(self) -> str:
        (length,) = self.scalars("Q")
        end = self.position + length
        if end > len(self.data):
            raise ValueError(f"a text ends at byte {end} of {len(self.data)}")
        value = self.data[self.position : end].decode()
        self.position = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalars(self._code(kind))[0]
        item_kind, count = self.scalars("IQ")
        if count > len(self.data):
            raise ValueError(f"an array has {count} items in {len(self.data)} bytes")
        if item_kind in (_STRING, _ARRAY):
            return tuple(self.value(item_kind) for _ in range(count))
        return self.scalars(f"{count}{self._code(item_kind)}")

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown type {kind} before byte {self.position}")
        return _SCALARS[kind]


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    magic, version = cursor.scalars("4sI")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    num_tensors, num_fields = cursor.scalars("QQ")
    metadata = {}
    for _ in range(num_fields):
        name = cursor.text()
        (kind,) = cursor.scalars("I")
        metadata[name] = cursor.value(kind)
    infos = [_parse_tensor(cursor) for _ in range(num_tensors)]
    alignment = Fields(metadata, origin=str(path)).count("general.alignment", default=32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GGUFTensorInfo(name, shape, type_id, start + offset)
        for name, shape, type_id, offset in infos
    }
    return GGUFHeader(path, metadata, tensors, data_offset=start)


def _parse_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    (num_dims,) = cursor.scalars("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    shape = cursor.scalars(f"{num_dims}Q")
    type_id, offset = cursor.scalars("IQ")
    return name, shape[::-1], type_id, offset
