"""The process that compiles kernels for ``compile_ahead``, each in a fork: none waits for a lock.

It is a fork of the process that asks, so that nothing has to be imported, and never uses a device.
What is compiled goes to Triton's cache on disk; a failure is told by whoever compiles the same
kernel again.
"""

import ast
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import triton_key


def write_job(source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> str:
    """Return a specialised kernel as one line of Python literals, its function by name.

    Raises:
        ValueError: a constant is no literal, or the function was made at run time.
    """
    function = source.fn
    is_named = vars(sys.modules[function.__module__]).get(function.__name__) is function
    if not is_named:
        raise ValueError(f"{function.__module__} has another {function.__name__}, or none")
    job = (
        (function.__module__, function.__name__, function.cache_key),
        (source.signature, source.constants, source.attrs),
        (target.backend, target.arch, target.warp_size),
        dict(options),
    )
    line = repr(job)
    try:
        is_literal = ast.literal_eval(line) == job
    except (SyntaxError, ValueError):
        is_literal = False
    if not is_literal:
        raise ValueError(f"{function.__name__} cannot be written as literals: {line}")
    return line


def serve(jobs: int, results: int) -> None:
    """Read jobs, a line each, from one pipe; write a job's number to the other when it is done.

    What is written first is the length of Triton's own key, and the key.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    key = triton_key().encode()  # reads all of Triton, and is remembered: no fork does it again
    os.write(results, len(key).to_bytes(4, "little") + key)
    with os.fdopen(jobs, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the assembler's end is asked for
                with contextlib.suppress(Exception):  # told where the kernel is compiled again
                    _compile(*ast.literal_eval(line))
                os.write(results, number.to_bytes(4, "little"))
                return


def _compile(
    name: tuple[str, str, str],
    specialization: tuple[Any, Any, Any],
    target: tuple[str, int, int],
    options: dict[str, Any],
) -> None:
    kernel: JITFunction[Any] = getattr(import_module(name[0]), name[1])
    kernel.hash = name[2]  # Triton's keys depend on which kernels it has made keys for before
    create = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = compile_source(
        create(kernel, *specialization), target=GPUTarget(*target), options=options
    )
    if hasattr(driver, "make_launcher"):  # before 3.7 each kernel's first launch runs a C compiler
        driver.CudaLauncher(compiled.src, compiled.metadata)
