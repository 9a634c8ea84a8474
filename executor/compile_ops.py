"""The process that compiles operations, with inductor, into libraries that need no inductor.

It has the folder as its argument and reads one line, a JSON list of operations; it ends when its
input does, whatever it does then. Of several such processes one compiles. An operation is there as
soon as its library's checksum is. Why something was not compiled is written to the output.
"""

import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, config
from torch._inductor.cpu_vec_isa import VecAMX, pick_vec_isa
from torch._inductor.ir import StorageBox
from torch._inductor.utils import fresh_cache
from torch.fx.experimental import _config

from octavo.executor.private_folder import create_private

UNFINISHED = "unfinished-"


def main(folder: Path) -> None:
    """Compile what lacks its library."""
    torch.set_num_threads(1)
    ops = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    create_private(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{UNFINISHED}*"):  # by a process that was ended
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as scratch:
            for op in ops:
                if not (folder / f"{op['name']}.crc").exists():
                    _compile(op, Path(scratch))
                    for ending in ("so", "crc"):
                        name = f"{op['name']}.{ending}"
                        os.replace(Path(scratch) / name, folder / name)


def _end_with_input() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)  # the compiler, too


def _compile(op: dict[str, Any], scratch: Path) -> None:
    """Write the library and its checksum."""
    options = {
        "cpp.threads": op["num_threads"],
        "cpp.dynamic_threads": op["num_threads"] > 1,  # as many as its caller lets it
        # 283 MB, and in a folder for temporary files, where others might have put theirs.
        "aot_inductor.precompile_headers": False,
    }
    products = _multiply_tiles() if op["with_tiles"] else nullcontext()
    archive = scratch / f"{op['name']}.pt2"
    any_size = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]  # made at run time
    with torch.no_grad(), fresh_cache(dir=str(scratch)), config.patch(options), any_size, products:
        aoti_compile_and_package(_trace(op), package_path=str(archive))
    with zipfile.ZipFile(archive) as members:
        (library,) = (name for name in members.namelist() if name.endswith(".so"))
        content = members.read(library)
    (scratch / f"{op['name']}.so").write_bytes(content)
    (scratch / f"{op['name']}.crc").write_text(str(zlib.crc32(content)))


@contextmanager
def _multiply_tiles() -> Iterator[None]:
    """Let inductor make products of its own for weights in four bits, which are tiles already."""
    if not isinstance(pick_vec_isa(), VecAMX):
        raise RuntimeError("the compiler does not know AMX")  # other products read another order
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
    # It expects constants, whose contents it would bring into the order of tiles.
    any_weight = mock.patch.object(StorageBox, "is_module_buffer", return_value=True)
    with config.patch(options), any_weight:
        yield


def _trace(op: dict[str, Any]) -> torch.export.ExportedProgram:
    """Return the function as a graph for all sizes, one row included."""
    function = getattr(importlib.import_module(op["module"]), op["function"])
    inputs = tuple(
        torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype, _ in op["inputs"]
    )
    varying = tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for *_, dims in op["inputs"])
    module = _Module(partial(function, **op["constants"]))
    return torch.export.export(module, inputs, dynamic_shapes=(varying,), strict=False)


def describe(error: Exception) -> str:
    """Return one line: what failed and, of all that a compiler has written, its first error."""
    first, *others = f"{type(error).__name__}: {error}".strip().splitlines()
    return ": ".join([first, *[line for line in others if "error: " in line.lower()][:1]])


class _Module(nn.Module):
    """What ``torch.export`` takes in place of a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        result: Tensor = self._function(*tensors)
        return result


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # told by whoever started this process
        print(describe(error))
        sys.exit(1)
