"""Kernels are compiled by another process, and by this one where that cannot be."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from triton import JITFunction
from triton.compiler import ASTSource, make_backend
from triton.runtime import _async_compile
from triton.runtime.cache import triton_key

from octavo.executor import compile_ahead
from octavo.executor.compile_ahead import (
    CompileMode,
    CompileServer,
    ForkingExecutor,
    StartCompiler,
)
from octavo.executor.compile_server import write_job
from tests.executor.tiny_kernel import HOPPER, double, make_source
from tests.source_tree import ROOT


@pytest.fixture(autouse=True, scope="module")
def known_key():
    """Reading all of Triton takes half a second in each process that forks before it is done."""
    triton_key()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kernels_are_compiled_in_another_process_once(cache):
    """In a process of its own: the tests' interpreter changes Triton's language for good."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.executor.compile_twice"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "3", "compiled", "0"]


def make_job(source=None):
    options = make_backend(HOPPER).parse_options({}).__dict__
    return write_job(source or make_source(64), HOPPER, options)


@pytest.mark.parametrize(
    "job",
    [
        make_job().replace("double", "no_such_kernel"),
        make_job().replace("tests.executor", "tests.no_such_folder"),
        make_job().replace("*fp32", "no such type"),
    ],
)
def test_a_job_that_fails_ends(server, job):
    server.compile(job)


def test_what_is_no_literal_is_compiled_here():
    with pytest.raises(ValueError, match="double cannot be written as literals"):
        make_job(make_source(torch.float32))


@pytest.mark.parametrize("name", ["double", "made"])
def test_a_function_that_its_module_does_not_have_is_compiled_here(name):
    made = JITFunction(double.fn)
    made.__name__ = name
    source = ASTSource(made, {"values": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
    with pytest.raises(ValueError, match=f"tiny_kernel has another {name}, or none"):
        make_job(source)


@pytest.fixture(scope="module")
def server():
    server = CompileServer()
    yield server
    server.close()


def test_the_other_process_finds_tritons_key(server):
    assert server.find_key() == triton_key()


def test_nobody_waits_for_a_process_that_was_killed():
    server = CompileServer()
    os.kill(server._pid, signal.SIGKILL)
    assert server.find_key() in (None, triton_key())
    server.compile(make_job())
    server.compile(make_job())
    server.close()


@pytest.mark.parametrize("num_jobs", [0, 1, 4])
def test_nobody_waits_for_a_process_that_hangs(num_jobs, monkeypatch):
    """Of four jobs two fit into the pipe that nobody reads."""
    monkeypatch.setattr(compile_ahead, "serve", lambda *_: time.sleep(60))
    monkeypatch.setattr(compile_ahead, "JOB_TIMEOUT_S", 0.05)
    server = CompileServer()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(server.compile, ["x" * 30_000] * num_jobs))
    assert server.find_key() is None
    server.close()


def test_forks_end_with_their_process(monkeypatch):
    """Else their end of the pipe is waited for."""

    def serve(jobs, results):
        os.read(jobs, 1)
        if os.fork() > 0:
            os.write(results, bytes(8))  # no key, and the first job
        time.sleep(60)

    monkeypatch.setattr(compile_ahead, "serve", serve)
    server = CompileServer()
    server.compile("job")
    server.close()


def test_a_closure_of_another_triton_is_run_here(server):
    with ForkingExecutor(server) as executor:
        assert executor.submit(lambda: 7).result() == 7


def launch_twice(mode, compile_kernel):
    """Return what a kernel's function remembers of it, which changes later."""
    remembered = []
    for _ in range(2):
        mode.submit("key", compile_kernel, remembered.append)
    return remembered


def test_a_kernel_that_is_being_compiled_is_remembered():
    with ThreadPoolExecutor(1) as executor, CompileMode(executor) as mode:
        remembered = launch_twice(mode, lambda: 7)
        (kernel,) = remembered
        assert kernel.result() == 7
    assert remembered == [kernel, 7]


def test_a_kernel_that_was_not_compiled_is_forgotten():
    for _ in range(2):
        with (
            pytest.raises(ZeroDivisionError),
            ThreadPoolExecutor(1) as executor,
            CompileMode(executor) as mode,
        ):
            remembered = launch_twice(mode, lambda: 1 / 0)
        assert remembered[1:] == [None]


class NoServer:
    def close(self):
        pass


class LoadableKernel:
    is_loaded = False

    def _init_handles(self):
        self.is_loaded = True


def test_kernels_are_loaded_once_all_are_compiled(monkeypatch):
    monkeypatch.setattr("octavo.executor.compile_ahead.CompileServer", NoServer)
    monkeypatch.setattr("octavo.executor.compile_ahead._begin_keys", lambda: None)
    kernels = {name: LoadableKernel() for name in "ab"}
    with StartCompiler() as compiler, compiler.compiling_ahead():
        for name, kernel in kernels.items():
            _async_compile.active_mode.get().submit(name, lambda kernel=kernel: kernel, print)
        assert not any(kernel.is_loaded for kernel in kernels.values())
    assert all(kernel.is_loaded for kernel in kernels.values())


def test_a_start_without_a_device_ends_its_process():
    with StartCompiler() as compiler:
        pid = compiler._server._pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_other_process_holds_nothing_open():
    reader, writer = os.pipe()
    server = CompileServer()
    os.close(writer)
    assert os.read(reader, 1) == b"", "the end of the pipe is not seen"
    os.close(reader)
    server.close()
