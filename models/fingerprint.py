"""The root of every block key: equal in all processes that would compute equal K/V, else not."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from octavo.models.config import ModelConfig
from octavo.models.gguf_header import read_gguf_header
from octavo.models.safetensors_checkpoint import list_safetensors
from octavo.models.source import ModelSource

SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 3


def cache_namespace(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    tensor_parallel_size: int,
    integers: str | None = None,
) -> bytes:
    """Return 32 bytes that name the weights and everything else K/V values depend on.

    Weights are known by their headers, sizes and samples, dummy ones by their seed. Neither the
    place of the files nor their dates matter.
    """
    settings = {
        "config": asdict(config),  # rope overrides are in here
        "dtype": str(dtype),
        "kv_dtype": str(kv_dtype),
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel_size,
        "integers": integers,  # that matrices are rounded to
    }
    digest = hashlib.sha256()
    for part in (json.dumps(settings, sort_keys=True).encode(), *_describe_weights(source)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _describe_weights(source: ModelSource) -> Iterator[bytes]:
    yield source.load_format.encode()
    if not source.is_gguf:
        yield (source.path / "config.json").read_bytes()
    match source.load_format:
        case "dummy":
            yield str(source.seed).encode()
        case "gguf":
            yield from _describe_file(source.path, read_gguf_header(source.path).data_offset)
        case "safetensors":
            for path in list_safetensors(source.path):
                with path.open("rb") as file:
                    header_size = 8 + int.from_bytes(file.read(8), "little")
                yield from _describe_file(path, header_size)


def _describe_file(path: Path, header_size: int) -> Iterator[bytes]:
    """Yield the file's size, its header, and samples from its first to its last byte."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        yield file.read(header_size)
        spread = max(0, size - header_size - SAMPLE_BYTES)
        for index in range(_SAMPLES_PER_FILE):
            file.seek(header_size + spread * index // (_SAMPLES_PER_FILE - 1), os.SEEK_SET)
            yield file.read(SAMPLE_BYTES)
