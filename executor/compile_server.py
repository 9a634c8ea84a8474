"""The process that compiles kernels for ``compile_ahead``, each in a fork: none waits for a lock.

It has neither threads nor a device, unlike the process that asks: it may fork. What is compiled
goes to Triton's cache on disk; a failure is told by whoever compiles the same kernel again.
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
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import triton_key


def write_job(source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> str:
    """Return a specialised kernel as one line of Python literals, its function by name.

    Raises:
        ValueError: a constant is no literal.
    """
    function = source.fn
    job = (
        (function.__module__, function.__name__),
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


def main() -> None:
    """Take jobs, a line each, from stdin; write a job's number to stdout when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    results = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no result
    triton_key()  # reads all of Triton, and is remembered: once, instead of in each fork
    for number, line in enumerate(sys.stdin):
        job = ast.literal_eval(line)
        with contextlib.suppress(Exception):  # told where the kernel is compiled again
            import_module(job[0][0])
        if os.fork() == 0:
            try:
                with contextlib.suppress(Exception):
                    _compile(*job)
                os.write(results, number.to_bytes(4, "little"))
            finally:
                os._exit(0)


def _compile(
    name: tuple[str, str],
    specialization: tuple[Any, Any, Any],
    target: tuple[str, int, int],
    options: dict[str, Any],
) -> None:
    kernel: JITFunction[Any] = getattr(import_module(name[0]), name[1])
    create = GluonASTSource if kernel.is_gluon() else ASTSource
    compile_source(create(kernel, *specialization), target=GPUTarget(*target), options=options)
