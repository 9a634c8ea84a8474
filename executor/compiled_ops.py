"""Small operations of a CPU's decode steps, compiled: a layer has six of them instead of 25.

What was compiled lies in the cache folder and is loaded in milliseconds. What is missing another
process compiles while this one serves, with the time that its cores have left, and between two
steps it is taken over. Without a C++ compiler torch's own operations go on serving.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import __version__
from octavo.attention import small_ops as attention_ops
from octavo.attention.cpu_backend import CpuBackend
from octavo.attention.small_ops import AttentionOps
from octavo.executor.private_folder import is_private
from octavo.models import small_ops as layer_ops
from octavo.models.flat import FlatNetwork, LayerOps

logger = logging.getLogger(__name__)

Run = Callable[[list[Tensor]], list[Tensor]]
"""A library's operation."""

FORMAT = 1
"""Rises when libraries are made in another way, of the same functions."""
START = (
    "import runpy, sys; sys.path[:] = sys.argv[2:]; "
    "runpy.run_module('octavo.executor.compile_ops', run_name='__main__')"
)
"""Python's command that compiles: it imports what this process does."""
NOT_COMPILED = "operations are not compiled, so steps of few rows take up to a third longer: %s"
MIN_HIDDEN_SIZE = 256
"""Narrower networks are for tests: compiling takes longer than they ever run."""


@dataclass(frozen=True, slots=True)
class Example:
    """What an operation gets: it may have any size along the dimensions that vary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[int, ...] = (0,)


class Op:
    """A function of tensors that is to be compiled, and the name of its library."""

    def __init__(
        self, function: Callable[..., Tensor], *inputs: Example, **constants: float
    ) -> None:
        self._job = {
            "module": function.__module__,
            "function": function.__name__,
            "constants": constants,
            "inputs": [
                (one.shape, str(one.dtype).removeprefix("torch."), one.varying) for one in inputs
            ],
        }
        digest = hashlib.sha256()
        source = getsource(sys.modules[function.__module__])
        for part in (FORMAT, __version__, torch.__version__, _describe_cpu(), source, self._job):
            digest.update(f"{part}\n".encode())
        self.name = f"{function.__name__}-{digest.hexdigest()[:32]}"

    @property
    def job(self) -> dict[str, Any]:
        """What ``compile_ops`` needs to know."""
        return self._job | {"name": self.name}


def can_compile(network: FlatNetwork) -> bool:
    """Return whether one set of operations serves all layers, and enough work is to be expected."""
    kinds = {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rotary.shape[1], layer.scale)
        for layer in network.attention_layers
    }
    return len(kinds) == 1 and network.network.config.hidden_size >= MIN_HIDDEN_SIZE


def list_ops(network: FlatNetwork, backend: CpuBackend, dtype: torch.dtype) -> list[Op]:
    """Return add_norm, silu_mul, turn_and_store and attend_tile where products give ``dtype``."""
    config, layer = network.network.config, network.attention_layers[0]
    head_dim, num_heads, num_kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    rows, width, weight = 3, 5, network.network.norm.weight.dtype
    hidden, line = (rows, config.hidden_size), (rows, 2 * num_kv_heads * head_dim)
    qkv = rows, (num_heads + 2 * num_kv_heads) * head_dim
    table = rows, layer.rotary.shape[1]
    lines = Example(line, backend.kv_pool.dtype)
    norms = [
        Example(tuple(norm.shape), norm.dtype, ())
        for norm in (layer.q_norm, layer.k_norm)
        if norm is not None
    ]
    return [
        Op(
            layer_ops.add_norm,
            Example(hidden, weight),
            Example(hidden, dtype),
            Example(hidden[1:], weight, ()),
            eps=config.norm_eps,
        ),
        Op(layer_ops.silu_mul, Example((rows, 2 * config.intermediate_size), dtype)),
        Op(
            attention_ops.turn_and_store,
            Example(qkv, dtype),
            Example(table, torch.float32),
            lines,
            Example((rows,), torch.int64),
            *norms,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            eps=layer.norm_eps,
        ),
        Op(
            attention_ops.attend_tile,
            Example((rows, num_heads, head_dim), lines.dtype),
            lines,
            Example((rows * width,), torch.int64),
            Example((rows, 1, 1, width), lines.dtype, (0, 3)),
            num_kv_heads=num_kv_heads,
            scale=layer.scale,
        ),
    ]


class CompiledOps:
    """Gives a network and its backend compiled operations, as soon as there are libraries of them.

    Owns the process that compiles, which ends with this object.
    """

    def __init__(self, network: FlatNetwork, backend: CpuBackend, folder: Path) -> None:
        self._network, self._backend, self._folder = network, backend, folder
        self._missing = {
            dtype: list_ops(network, backend, dtype) for dtype in network.find_product_types()
        }
        self._process: subprocess.Popen[str] | None = None

    def load(self) -> None:
        """Take over what has been compiled; damaged libraries are removed.

        What is whole but cannot be loaded is done without. Nothing is taken from a folder where
        other users can write: a library is code.
        """
        if not is_private(self._folder):
            return
        for dtype, ops in list(self._missing.items()):
            if all(os.path.exists(self._folder / f"{op.name}.crc") for op in ops):
                loaded = [_load(self._folder, op.name) for op in ops]
                if None not in loaded:
                    self._use(dtype, [_call(run) for run in loaded if run is not None])
                if all(os.path.exists(self._folder / f"{op.name}.crc") for op in ops):
                    del self._missing[dtype]

    def _use(self, dtype: torch.dtype, ops: list[Callable[..., Tensor]]) -> None:
        add_norm, silu_mul, turn_and_store, attend_tile = ops
        with_weight = LayerOps(lambda total, x, norm: add_norm(total, x, norm.weight), silu_mul)
        self._network.use(dtype, with_weight)
        self._backend.use(dtype, AttentionOps(turn_and_store, attend_tile))
        logger.info("steps of few rows have compiled operations on %s", dtype)

    def compile(self) -> None:
        """Start to compile what is missing; the log says so if that cannot be done."""
        jobs = [op.job for ops in self._missing.values() for op in ops]
        if not jobs:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(self._folder), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0,
            )
        except OSError as error:  # of memory, files or processes, or Python itself is embedded
            logger.warning(NOT_COMPILED, error)
            return
        weakref.finalize(self, _end, self._process, os.getpid())
        if hasattr(os, "SCHED_IDLE"):
            with contextlib.suppress(OSError):  # then it takes its share of the cores
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        with contextlib.suppress(OSError):  # where memory is short it ends, and not the engine
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, of which poll() tells
            print(json.dumps(jobs), file=self._process.stdin, flush=True)

    def poll(self) -> None:
        """Take over what has been compiled since; cheap, for every step."""
        if self._process is None:
            return
        status = self._process.poll()
        self.load()
        if status is not None:
            if status != 0:
                _tell_end(self._process)
            self._process = None


def _call(run: Run) -> Callable[..., Tensor]:
    return lambda *tensors: run(list(tensors))[0]


def _load(folder: Path, name: str) -> Run | None:
    """Return what a library computes; None if it cannot be loaded, or was damaged and removed."""
    library, checksum = folder / f"{name}.so", folder / f"{name}.crc"
    if (reason := _find_damage(library, checksum)) is not None:
        logger.warning("%s is damaged and will be compiled anew: %s", library, reason)
        with contextlib.suppress(OSError):
            checksum.unlink()
        return None
    try:
        run: Run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1).run
    except (OSError, RuntimeError) as error:  # a folder from which no code may be run
        reason = str(error).splitlines()[0]
        logger.warning("%s cannot be loaded and is done without: %s", library, reason)
        return None
    return run


def _find_damage(library: Path, checksum: Path) -> str | None:
    try:
        is_whole = checksum.read_bytes() == b"%d" % zlib.crc32(library.read_bytes())
    except OSError as error:
        return str(error)
    return None if is_whole else "its checksum is another"


def _tell_end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    reason = process.stdout.read().strip() or f"the process ended with {process.returncode}"
    logger.warning(NOT_COMPILED, reason)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End the process and what it has started; a fork of its owner lets it be."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@cache
def _describe_cpu() -> str:
    """Return what decides which instructions a compiler may use here."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    names = "vendor_id", "cpu family", "model", "flags", "Features", "CPU part"
    return "\n".join(line for line in text.splitlines() if line.startswith(names))
