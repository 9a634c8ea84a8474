"""Kernels are compiled by another process, and by this one where that cannot be."""

import os
import signal

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source

from octavo.executor.compile_ahead import CompileServer, ForkingExecutor, is_cached
from octavo.executor.compile_server import write_job
from tests.executor.tiny_kernel import double

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def make_source(size):
    return ASTSource(double, {"values": "*fp32", "SIZE": "constexpr"}, {"SIZE": size})


def make_closure(src, *, was_cached):
    """What Triton submits: a function that holds all it compiles with."""
    target, options, env_vars = HOPPER, make_backend(HOPPER).parse_options({}), {}

    def async_compile():
        was_cached.append(is_cached(src, target, options, env_vars))
        return compile_source(src, target=target, options=options.__dict__, _env_vars=env_vars)

    return async_compile


def test_kernels_are_read_from_the_cache_that_another_process_filled():
    was_cached = []
    with ForkingExecutor() as executor:
        compiled = [
            executor.submit(make_closure(make_source(size), was_cached=was_cached))
            for size in (128, 256, 512)
        ]
        assert all(kernel.result().asm["cubin"] for kernel in compiled)
    assert was_cached == [True] * 3


def test_what_is_cached_is_not_compiled_again(monkeypatch):
    source = make_source(64)
    compile_source(source, target=HOPPER, _env_vars={})
    monkeypatch.setattr(CompileServer, "compile", None)
    was_cached = []
    with ForkingExecutor() as executor:
        executor.submit(make_closure(source, was_cached=was_cached)).result()
    assert was_cached == [True]


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


@pytest.fixture(scope="module")
def server():
    server = CompileServer()
    yield server
    server.close()


def test_nobody_waits_for_a_process_that_was_killed():
    server = CompileServer()
    os.kill(server._pid, signal.SIGKILL)
    server.compile(make_job())
    server.compile(make_job())
    server.close()


def test_a_closure_of_another_triton_is_run_here():
    with ForkingExecutor() as executor:
        assert executor.submit(lambda: 7).result() == 7


def test_the_other_process_holds_nothing_open():
    reader, writer = os.pipe()
    server = CompileServer()
    os.close(writer)
    assert os.read(reader, 1) == b"", "the end of the pipe is not seen"
    os.close(reader)
    server.close()
