"""Small operations of a CPU's steps, compiled by another process: the libraries and their loss."""

import gc
import logging
import os
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.attention.backend import AttentionInputs
from octavo.attention.cpu_backend import CpuBackend
from octavo.config import EngineConfig
from octavo.executor import compile_ops, compiled_ops, op_list, worker
from octavo.executor.compiled_ops import MAX_ROWS_BESIDE_TILES, CompiledOps
from octavo.executor.op_list import OpList, can_compile
from octavo.executor.worker import create_runner
from octavo.models.flat import FlatNetwork
from octavo.models.ops.int4_linear import MAX_ROWS, can_quantize
from octavo.models.rounding import round_network
from tests.models.oracle import load, source_of
from tests.steps import make_step

FLOAT = torch.float32
CONTEXT = 21
TABLES = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(32, 2).int()


class Engine:
    """A network with its backend, whose pool holds something, and what may be compiled of them."""

    def __init__(self, model_folder, folder, *, is_int4=False):
        model = load(source_of(model_folder))
        if is_int4:
            round_network(model, "int4")
            model.pack()
        self.network = FlatNetwork(model)
        spec = self.network.network.kv_cache_spec(16)
        dtype = torch.bfloat16 if is_int4 else FLOAT
        self.backend = CpuBackend(spec, TABLES.numel(), dtype=dtype)
        self.backend.kv_pool.normal_(generator=torch.Generator().manual_seed(0))
        self.ops = CompiledOps(self.network, self.backend, folder)

    @property
    def is_compiled(self):
        return bool(self.network._ops) and bool(self.backend.ops.turn_and_store)

    def compute(self, num_rows):
        """Return hidden states of rows of one further token each, of several lengths."""
        lengths = torch.tensor([CONTEXT + row % 3 for row in range(num_rows)]).int()
        last = lengths.long() - 1
        slots = TABLES[torch.arange(num_rows), last // 16].long() * 16 + last % 16
        starts = torch.arange(num_rows + 1).int()
        inputs = AttentionInputs(starts, lengths, TABLES[:num_rows], last.int(), slots)
        with torch.inference_mode():
            return self.network(torch.arange(5, 5 + num_rows), self.backend.bind(inputs))

    def wait(self):
        """Let the process that compiles come to its end, and a step find that out."""
        self.ops._process.wait(timeout=300)
        self.ops.poll()


@pytest.fixture
def engine(tiny_9heads, tmp_path):
    return Engine(tiny_9heads, tmp_path)


def list_names(engine):
    return [op.name for op in OpList(engine.network, engine.backend).list_small(FLOAT)]


def write_library(folder, name, content, checksum):
    if content is not None:
        (folder / f"{name}.so").write_bytes(content)
    (folder / f"{name}.crc").write_bytes(checksum)


def list_warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("model", ["tiny_9heads", "qwen3"])
def test_compiled_steps_give_what_plain_ones_do(model, request, tmp_path, monkeypatch):
    """Compiled by one of two processes that start at once, found by an engine that starts later."""
    others_write_here = tmp_path / "temporary"
    others_write_here.mkdir()
    monkeypatch.setenv("TMPDIR", str(others_write_here))
    found = request.getfixturevalue(model)
    model_folder = getattr(found, "folder", found)
    first, second, plain = (Engine(model_folder, tmp_path) for _ in range(3))
    first.ops.compile()
    second.ops.compile()
    for engine in (first, second):
        engine.wait()
    late = Engine(model_folder, tmp_path)
    late.ops.load()
    late.ops.compile()
    assert late.ops._process is None
    assert [one.is_compiled for one in (first, second, late, plain)] == [True, True, True, False]
    for num_rows in (1, 2, 20):
        expected = plain.compute(num_rows)
        for engine in (first, late):
            torch.testing.assert_close(engine.compute(num_rows), expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(engine.backend.kv_pool, plain.backend.kv_pool)
    assert len(list(tmp_path.glob("*.so"))) == 5
    assert not list(tmp_path.glob("unfinished-*"))
    assert not [path for path in others_write_here.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.skipif(not can_quantize(), reason="this CPU has no AVX2")
@pytest.mark.parametrize("has_tiles", [False, True])
def test_compiled_layers_of_four_bits_give_what_plain_ones_do(
    has_tiles, qwen3, tmp_path, monkeypatch
):
    if has_tiles and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no matrix units")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    compiled, plain = (Engine(qwen3.folder, tmp_path, is_int4=True) for _ in range(2))
    compiled.ops.compile()
    compiled.wait()
    limits = [MAX_ROWS_BESIDE_TILES, sys.maxsize] if has_tiles else [MAX_ROWS]
    assert list(compiled.network._fused) == limits
    for num_rows in (1, 2, MAX_ROWS_BESIDE_TILES, MAX_ROWS, 20):
        expected, found = plain.compute(num_rows), compiled.compute(num_rows)
        assert (found - expected).norm() < 0.02 * expected.norm()
        pools = [engine.backend.kv_pool.float() for engine in (compiled, plain)]
        assert (pools[0] - pools[1]).norm() < 0.01 * pools[1].norm()


def test_without_a_compiler_the_reason_is_told_once_and_steps_go_on(engine, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    expected = engine.compute(2)
    engine.ops.compile()
    engine.wait()
    engine.ops.poll()
    (warning,) = list_warnings(caplog)
    assert "operations are not compiled" in warning
    assert "compiler" in warning.lower().partition(": ")[2]
    assert not engine.is_compiled
    assert torch.equal(engine.compute(2), expected)


RIGHT = b"%d" % zlib.crc32(b"junk")


def test_the_reason_is_one_line_with_the_compilers_first_error():
    output = "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp: In function f:\n"
    output += "a.cpp:3: fatal error: error writing to a.s: No space left\nb.cpp:1: error: no"
    assert compile_ops.describe(RuntimeError(output)) == (
        "RuntimeError: C++ compile error: a.cpp:3: fatal error: error writing to a.s: No space left"
    )
    assert compile_ops.describe(OSError("no disk\nat all")) == "OSError: no disk"


@pytest.mark.parametrize(
    ("content", "checksum"),
    [
        (b"junk", b"0"),
        (b"jun", RIGHT),
        (b"", b""),
        (b"junk", b"\xff"),
        (None, b"0"),
    ],
)
def test_a_damaged_library_is_told_of_and_compiled_anew(engine, content, checksum, caplog):
    names, folder = list_names(engine), engine.ops._folder
    for name in names:
        write_library(folder, name, content, checksum)
    engine.ops.load()
    assert not engine.is_compiled
    assert "is damaged and will be compiled anew" in caplog.text
    assert not list(folder.glob("*.crc"))
    assert [op.name for group in engine.ops._missing for op in group.ops] == names


def test_a_library_that_cannot_be_loaded_is_told_of_once_and_done_without(engine, caplog):
    """As in a folder from which no code may be run: compiled anew it would be the same."""
    for name in list_names(engine):
        write_library(engine.ops._folder, name, b"junk", RIGHT)
    engine.ops.load()
    engine.ops.load()
    engine.ops.compile()
    assert not engine.is_compiled
    assert engine.ops._process is None
    assert len(list_warnings(caplog)) == len(list_names(engine))
    assert "cannot be loaded and is done without" in caplog.text


def test_where_memory_is_short_the_process_that_compiles_ends_first(engine):
    engine.ops.compile()
    process = engine.ops._process
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n"


def test_libraries_are_taken_only_when_all_are_there(engine, monkeypatch):
    names, folder = list_names(engine), engine.ops._folder
    monkeypatch.setattr(compiled_ops, "_load", lambda folder, name: lambda tensors: [name])
    for name in names:
        engine.ops.load()
        assert not engine.is_compiled
        write_library(folder, name, b"", b"0")
    engine.ops.load()
    assert engine.is_compiled
    assert engine.backend.ops.attend_tile[FLOAT]() == names[3]


def test_the_process_that_compiles_ends_with_its_engine(engine):
    engine.ops.compile()
    process = engine.ops._process
    assert process.poll() is None
    del engine.ops
    gc.collect()
    assert process.returncode is not None


def test_a_fork_of_the_engine_leaves_the_process_alone(engine, monkeypatch):
    engine.ops.compile()
    process = engine.ops._process
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: 0)
        del engine.ops
        gc.collect()
    assert process.poll() is None
    compiled_ops._end(process, os.getpid())


def test_the_process_imports_what_its_engine_does(engine, tmp_path, monkeypatch):
    """And not what lies in the folder where it was started."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "engine"), *sys.path])
    for folder in (tmp_path, tmp_path / "engine"):
        folder.mkdir(exist_ok=True)
        (folder / "zipfile.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')")
    engine.ops.compile()
    engine.wait()
    assert not (tmp_path / "was_run").exists()
    assert (tmp_path / "engine" / "was_run").exists()


def test_a_process_that_cannot_be_started_is_told_of(engine, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "")
    engine.ops.compile()
    engine.ops.poll()
    (warning,) = list_warnings(caplog)
    assert "operations are not compiled" in warning


def test_nothing_is_taken_from_a_folder_where_others_write(engine, monkeypatch, caplog):
    names, folder = list_names(engine), engine.ops._folder
    monkeypatch.setattr(compiled_ops, "_load", lambda folder, name: lambda tensors: [name])
    for name in names:
        write_library(folder, name, b"", b"0")
    folder.chmod(0o777)
    engine.ops.load()
    engine.ops.compile()
    engine.wait()
    assert not engine.is_compiled
    (warning,) = list_warnings(caplog)
    assert "another user can write in it" in warning


def test_a_library_belongs_to_types_and_sizes(tiny_9heads, tiny_spm, tmp_path):
    first, other = Engine(tiny_9heads, tmp_path), Engine(tiny_spm, tmp_path)
    sets = [
        {op.name for op in OpList(one.network, one.backend).list_small(dtype)}
        for one in (first, other)
        for dtype in (FLOAT, torch.bfloat16)
    ]
    assert list_names(Engine(tiny_9heads, tmp_path)) == list_names(first)
    (shared,) = sets[0] & sets[2]
    assert shared.startswith("silu_mul-"), "both are as wide inside"
    assert not sets[0] & sets[1]


def test_networks_of_tests_and_of_several_kinds_of_layers_are_not_compiled(engine, monkeypatch):
    assert not can_compile(engine.network)
    monkeypatch.setattr(op_list, "MIN_HIDDEN_SIZE", 1)
    assert can_compile(engine.network)
    layers = engine.network.attention_layers
    other = type("Other", (), {"attention_layers": [*layers, FakeLayer(layers[0])]})
    other.network = engine.network.network
    assert not can_compile(other)


class FakeLayer:
    """An attention layer but for the size of its heads."""

    def __init__(self, layer):
        self._layer = layer
        self.head_dim = 2 * layer.head_dim

    def __getattr__(self, name):
        return getattr(self._layer, name)


@pytest.mark.parametrize(
    ("settings", "is_wanted"),
    [({}, True), ({"enforce_eager": True}, False), ({"attention_backend": "reference"}, False)],
)
def test_an_engine_compiles_unless_told_not_to(
    settings, is_wanted, tiny_9heads, tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr(worker, "can_compile", lambda network: True)
    monkeypatch.setattr(CompiledOps, "compile", lambda self: started.append(self._folder))
    source = replace(source_of(tiny_9heads), cache_dir=tmp_path)
    create_runner(EngineConfig(num_gpu_blocks_override=16, **settings), source)
    assert started == [tmp_path / "compiled"] * is_wanted


def test_an_engine_without_a_cache_compiles_nothing(tiny_9heads, monkeypatch):
    started = []
    monkeypatch.setattr(worker, "can_compile", lambda network: True)
    monkeypatch.setattr(CompiledOps, "compile", lambda self: started.append(self._folder))
    create_runner(EngineConfig(num_gpu_blocks_override=16), source_of(tiny_9heads))
    assert started == []


def test_every_step_asks_first_what_has_been_compiled_since(tiny_9heads, tmp_path, monkeypatch):
    polls = []
    monkeypatch.setattr(worker, "can_compile", lambda network: True)
    monkeypatch.setattr(CompiledOps, "compile", lambda self: None)
    monkeypatch.setattr(CompiledOps, "poll", lambda self: polls.append(self))
    source = replace(source_of(tiny_9heads), cache_dir=tmp_path)
    runner = create_runner(EngineConfig(num_gpu_blocks_override=16), source)
    for step_id in range(2):
        runner.run(make_step(step_id, []))
    assert len(polls) == 2
