"""Keeps a rounded network in the cache folder, so that a later start need not round it again.

A copy belongs to the contents of the weights' files, to the kind of integers, and to the torch and
the CPU whose operators read it. Whoever finds it damaged makes it anew; whoever makes one removes
those that have not been used for longest.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo import __version__
from octavo.models.causal_lm import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.layers.parallel import Shard
from octavo.models.loader import build_model, load_model
from octavo.models.rounding import IntegerName, restore_network, round_network
from octavo.models.safetensors_checkpoint import list_safetensors
from octavo.models.source import ModelSource

logger = logging.getLogger(__name__)

FORMAT = 2
"""Rises when other tensors, or others of the same names, are kept."""
MAX_SOURCE_BYTES = 2**30
"""Larger files are not copied: that would fill the disk, and take long to read, too."""
MAX_COPIES = 4
"""So many are kept: other files, settings and versions make others."""
ABANDONED_S = 24 * 3600
"""Nobody takes so long to write a copy: a process that did not end well has left it."""
CPU = torch.device("cpu")


def load_rounded(
    source: ModelSource, config: ModelConfig, name: IntegerName, *, memory_limit: int | None = None
) -> CausalLM:
    """Return the network with integer matrices: of its copy, or loaded, rounded and then copied.

    Raises:
        ModelLoadError: a tensor is missing, unknown, misshapen or cut.
        ConfigError: the network or its integers do not suit this machine.
    """
    path = _find_place(source, config, name)
    if path is not None and (tensors := _read(path)) is not None:
        model = build_model(
            config, Shard(), dtype=torch.float32, device=CPU, memory_limit=memory_limit
        )
        restore_network(model, name, tensors)
        return model.eval()
    model = load_model(source, config, dtype=torch.float32, device=CPU, memory_limit=memory_limit)
    copy: dict[str, Tensor] | None = None if path is None else {}
    round_network(model, name, copy=copy)
    if path is not None and copy is not None:
        _write(path, copy)
    return model


def _find_place(source: ModelSource, config: ModelConfig, name: IntegerName) -> Path | None:
    """Return where the copy is or belongs; None if none is to be made."""
    if source.cache_dir is None or source.load_format == "dummy":
        return None
    files = [source.path] if source.is_gguf else list_safetensors(source.path)
    if sum(file.stat().st_size for file in files) > MAX_SOURCE_BYTES:
        return None
    digest = hashlib.sha256()
    for part in (FORMAT, __version__, config, name, torch.__version__, _describe_cpu()):
        digest.update(f"{part}\n".encode())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return source.cache_dir / "rounded" / f"{digest.hexdigest()[:32]}.safetensors"


def _describe_cpu() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    units = torch.cpu._is_vnni_supported(), torch.cpu._is_amx_tile_supported()
    return f"{capability} {units}"


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a copy; None if there is none that is whole."""
    if not os.path.exists(path):  # a path's own method fails where folders cannot be entered
        return None
    try:
        with safe_open(path, framework="pt") as file:
            sums = file.metadata() or {}
            # Clones, for the file may go away; what is checked is what was read.
            tensors = {key: file.get_tensor(key).clone() for key in sums}
            is_whole = 0 < len(tensors) == len(file.keys())
        damaged = [key for key, tensor in tensors.items() if sums[key] != _checksum(tensor)]
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged and will be made anew: %s", path, error)
        return None
    if damaged or not is_whole:
        logger.warning("%s is damaged and will be made anew: %s", path, ", ".join(damaged[:3]))
        return None
    with suppress(OSError):
        os.utime(path)  # it is in use
    return tensors


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a copy that appears whole or not at all, whoever else does the same."""
    sums = {key: _checksum(tensor) for key, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / path.name
            save_file({key: tensor.detach() for key, tensor in tensors.items()}, temporary, sums)
            os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        logger.info("the rounded weights are not kept in %s: %s", path.parent, error)
        return
    with suppress(OSError):  # others remove at the same time
        _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    """Remove copies, the longest unused first, and what was left half-written.

    Whoever reads one at the time has it open, or makes it anew.
    """
    copies = sorted(folder.glob("*.safetensors"), key=os.path.getmtime, reverse=True)
    for path in copies[MAX_COPIES:]:
        path.unlink()
    for path in folder.iterdir():
        if path.is_dir() and time.time() - path.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(path)


def _checksum(tensor: Tensor) -> str:
    """Return the tensor's CRC-32: it finds damage, and takes half the time of SHA-256."""
    return str(zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data))
