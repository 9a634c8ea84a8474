"""Compiles the kernels of a start side by side, instead of one after the other at first launch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, JITFunction

NUM_THREADS = 16
"""Most of a kernel's compilation runs outside Python's lock: more kernels than cores may wait."""


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile what is launched inside and launch nothing; everything is compiled at the end.

    Torch's own kernels do run, on memory that no kernel of ours has written.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=True, **options)

    with ThreadPoolExecutor(NUM_THREADS) as threads, AsyncCompileMode(threads):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
