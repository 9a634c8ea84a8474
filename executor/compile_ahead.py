"""Compiles the kernels of a start side by side, instead of one after the other at first launch.

Much of a kernel's compilation holds Python's lock, so threads alone gain little. Kernels that are
not in Triton's cache on disk yet are compiled by forks of another process; threads here wait for
them and read them from the cache.
"""

import contextlib
import inspect
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from triton import AsyncCompileMode, JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.compiler.compiler import ASTSource
from triton.runtime import cache, driver
from triton.runtime.cache import get_cache_key, get_cache_manager

from octavo.executor.compile_server import serve, write_job

logger = logging.getLogger(__name__)

NUM_THREADS = min(32, 2 * (os.cpu_count() or 1))
"""Kernels that compile at a time; a start has about 30."""

JOB_TIMEOUT_S = 60
"""No kernel takes so long: then all that are left are compiled in this process."""


class StartCompiler:
    """Compiles the kernels of one start; made before the device is used, which makes forks slow.

    Owns the process that compiles, and a thread that finds what the keys of all kernels begin with.
    """

    def __init__(self) -> None:
        self._server = CompileServer()
        self._thread = ThreadPoolExecutor(1)
        self._keys = self._thread.submit(_begin_keys, self._server)

    def __enter__(self) -> "StartCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._server.close()

    @contextmanager
    def compiling_ahead(self) -> Iterator[None]:
        """Compile what is launched inside and launch nothing; all is compiled and loaded at the
        end: a kernel that is loaded at its first launch waits for what the device has begun.

        Torch's own kernels do run, on memory that no kernel of ours has written.
        """
        run = JITFunction.run

        def compile_only(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, warmup=True, **options)

        self._keys.exception()  # waits; what fails there fails here
        with ForkingExecutor(self._server) as executor, CompileMode(executor) as mode:
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = run
        for kernel in mode.future_kernels.values():
            kernel.result()._init_handles()


def _begin_keys(server: "CompileServer") -> None:
    """Let Triton remember its driver, the assembler's version and its own key: a second or two.

    To find the key here would take twice as long: threads that import hold Python's lock.
    """
    make_backend(driver.active.get_current_target()).hash()
    if (key := server.find_key()) is not None:
        cache.triton_key = lambda: key


class CompileMode(AsyncCompileMode):  # type: ignore[misc]  # Triton tells no types
    """Lets the launches that follow a kernel's first find that it is being compiled.

    Before 3.7 Triton makes the key anew for each of them, which takes a start seconds.
    """

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Any:
        """Compile a kernel, and remember for its function that this has begun."""
        kernel = super().submit(key, compile_fn, finalize_fn)
        if kernel.finalize_compile is finalize_fn:
            finalize_fn(kernel)
        return kernel

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            for kernel in self.future_kernels.values():
                if kernel.kernel is None:
                    kernel.finalize_compile(None)  # as if it had never been launched
            self.raw_futures.clear()
            super().__exit__(*error)  # after an error Triton does not end its mode itself


class ForkingExecutor(ThreadPoolExecutor):
    """Runs Triton's compile functions when what they compile lies in the cache on disk."""

    def __init__(self, server: "CompileServer") -> None:
        self._server = server
        super().__init__(NUM_THREADS)

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]  # for one kind of function
        """Compile a kernel; ``compile_kernel`` is the closure that Triton makes for it."""
        return super().submit(self._compile, compile_kernel)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        known = inspect.getclosurevars(compile_kernel).nonlocals
        if {"src", "target", "options", "env_vars"} <= known.keys():
            source, target, options = known["src"], known["target"], known["options"]
            if not is_cached(source, target, options, known["env_vars"]):
                try:
                    self._server.compile(write_job(source, target, options.__dict__))
                except ValueError as error:  # then it is compiled here
                    logger.debug("%s", error)
        return compile_kernel()


def is_cached(
    source: ASTSource, target: GPUTarget, options: Any, environment: dict[str, str]
) -> bool:
    """Return whether Triton would find a compiled kernel on disk."""
    key = get_cache_key(source, make_backend(target), options, environment)
    manager = get_cache_manager(sha256(key.encode()).hexdigest())
    name = f"{source.name[:150]}.json"
    return name in (manager.get_group(name) or {})


class CompileServer:
    """A fork of this process that compiles; ``compile`` may be called from several threads."""

    def __init__(self) -> None:
        job_reader, job_writer = os.pipe()
        result_reader, result_writer = os.pipe()
        with warnings.catch_warnings():
            # It warns of what other threads have locked. None of the engine's has been started, and
            # compiling needs nothing that a caller's may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                _close_others({0, 1, 2, job_reader, result_writer})
                serve(job_reader, result_writer)
            finally:
                os._exit(0)  # whatever the other process does at its end is its own affair
        self._pid = pid
        os.setpgid(pid, pid)  # its forks can be ended with it
        os.close(job_reader)
        os.close(result_writer)
        self._jobs = os.fdopen(job_writer, "w", encoding="utf-8")
        self._results = os.fdopen(result_reader, "rb")
        self._lock = threading.Lock()
        self._done: list[threading.Event] = []
        self._key: Future[str | None] = Future()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def compile(self, job: str) -> None:
        """Wait until a job is done, well or not, or the process has ended."""
        done = threading.Event()
        with self._lock:
            self._done.append(done)
            if self._has_ended:
                return
            try:
                print(job, file=self._jobs, flush=True)
            except BrokenPipeError:
                return
        if not done.wait(JOB_TIMEOUT_S):
            logger.warning("a kernel compiles for more than %d s: %s", JOB_TIMEOUT_S, job)
            self._kill()  # whoever waits for another one, or to be read, goes on, too

    def find_key(self) -> str | None:
        """Wait for Triton's own key, which the process finds; None if it does not."""
        try:
            return self._key.result(JOB_TIMEOUT_S)
        except TimeoutError:
            logger.warning("Triton's key was not found in %d s", JOB_TIMEOUT_S)
            self._kill()
            return None

    def close(self) -> None:
        """End the process, whatever it does."""
        self._kill()
        with contextlib.suppress(BrokenPipeError):  # of what could not be written before
            self._jobs.close()
        self._reader.join()
        os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self._pid, signal.SIGKILL)

    def _read(self) -> None:
        with self._results as results:
            length = int.from_bytes(results.read(4), "little")
            key = results.read(length).decode()
            self._key.set_result(key if key and len(key) == length else None)
            while number := results.read(4):
                self._done[int.from_bytes(number, "little")].set()
        with self._lock:
            self._has_ended = True
            for done in self._done:
                done.set()


def _close_others(kept: set[int]) -> None:
    """Close what this process shares with others, who wait for its end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
