"""Compiled operations of a CPU's steps: a layer has three to six of them instead of 25.

What was compiled lies in the cache folder and is loaded in milliseconds. What is missing another
process compiles while this one serves, with the time that its cores have left, and between two
steps it is taken over. Without a C++ compiler torch's own operations go on serving.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.attention.cpu_backend import CpuBackend
from octavo.executor.op_list import Op, OpList
from octavo.executor.private_folder import is_private
from octavo.models.flat import FlatNetwork, LayerOps
from octavo.models.fused import FusedOps, list_int4_layers
from octavo.models.ops import int4_linear

logger = logging.getLogger(__name__)

Run = Callable[[list[Tensor]], list[Tensor]]
"""A library's operation."""

START = (
    "import runpy, sys; sys.path[:] = sys.argv[2:]; "
    "runpy.run_module('octavo.executor.compile_ops', run_name='__main__')"
)
"""Python's command that compiles: it imports what this process does."""
NOT_COMPILED = "operations are not compiled, so steps take up to twice as long: %s"
MAX_ROWS_BESIDE_TILES = 4
"""Up to so many rows are multiplied faster without tiles."""

Use = Callable[[list[Callable[..., Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that are taken over together."""

    ops: list[Op]
    use: Use

    def is_in(self, folder: Path) -> bool:
        """Return whether there are libraries of all."""
        return all(os.path.exists(folder / f"{op.name}.crc") for op in self.ops)


class CompiledOps:
    """Gives a network and its backend compiled operations, as soon as there are libraries of them.

    Owns the process that compiles, which ends with this object.
    """

    def __init__(self, network: FlatNetwork, backend: CpuBackend, folder: Path) -> None:
        self._network, self._backend, self._folder = network, backend, folder
        self._missing = self._list_groups()
        self._process: subprocess.Popen[str] | None = None

    def load(self) -> None:
        """Take over what has been compiled; damaged libraries are removed.

        What is whole but cannot be loaded is done without. Nothing is taken from a folder where
        other users can write: a library is code.
        """
        if not is_private(self._folder):
            return
        for group in list(self._missing):
            if group.is_in(self._folder):
                loaded = [_load(self._folder, op.name) for op in group.ops]
                if None not in loaded:
                    group.use([_call(run) for run in loaded if run is not None])
                if group.is_in(self._folder):  # none was damaged
                    self._missing.remove(group)

    def _list_groups(self) -> list[Group]:
        """Return what is to be compiled, first what few rows need."""
        ops = OpList(self._network, self._backend)
        types = self._network.find_product_types()
        fused: list[Group] = []
        if layers := list_int4_layers(self._network.network):
            weights = layers[0].weights
            has_tiles = all(weight.has_tiles for weight in weights) and torch.cpu._init_amx()
            limits = {False: int4_linear.MAX_ROWS}
            if has_tiles:
                limits = {False: MAX_ROWS_BESIDE_TILES, True: sys.maxsize}
            for with_tiles, max_rows in limits.items():
                use = partial(self._use_fused, with_tiles, max_rows)
                fused.append(Group(ops.list_fused(weights, with_tiles=with_tiles), use))
            types = [] if has_tiles else types[-1:]  # of many rows
        return fused + [Group(ops.list_small(one), partial(self._use_small, one)) for one in types]

    def _use_fused(self, with_tiles: bool, max_rows: int, ops: list[Callable[..., Tensor]]) -> None:
        project, finish, *attend = ops
        self._use_attend(torch.bfloat16, *attend)
        self._network.fuse(FusedOps(project, finish, with_tiles), max_rows=max_rows)
        tokens = "more" if with_tiles else f"up to {max_rows}"
        logger.info("layers are compiled for steps of %s tokens", tokens)

    def _use_small(self, dtype: torch.dtype, ops: list[Callable[..., Tensor]]) -> None:
        add_norm, silu_mul, turn_and_store, *attend = ops
        with_weight = LayerOps(lambda total, x, norm: add_norm(total, x, norm.weight), silu_mul)
        self._network.use(dtype, with_weight)
        self._backend.ops.turn_and_store[dtype] = turn_and_store
        self._use_attend(dtype, *attend)
        logger.info("small operations on %s are compiled", dtype)

    def _use_attend(
        self, dtype: torch.dtype, tile: Callable[..., Tensor], row: Callable[..., Tensor]
    ) -> None:
        self._backend.ops.attend_tile[dtype], self._backend.ops.attend_row[dtype] = tile, row

    def compile(self) -> None:
        """Start to compile what is missing; the log says so if that cannot be done."""
        jobs = [op.job for group in self._missing for op in group.ops]
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
