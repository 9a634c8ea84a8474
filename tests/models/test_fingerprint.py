"""The namespace of block keys changes with what K/V depends on, and with nothing else."""

import dataclasses
import os
import shutil

import pytest
import torch

from octavo.models.config_files import load_config
from octavo.models.fingerprint import cache_namespace
from octavo.models.rope import RopeConfig
from tests.models.gguf_files import write_gguf
from tests.models.oracle import source_of


def namespace(source, *, rope=None, **changes):
    config = load_config(source)
    if rope is not None:
        config = dataclasses.replace(config, rope=rope)
    settings = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "block_size": 16,
        "tensor_parallel_size": 1,
    }
    return cache_namespace(source, config, **{**settings, **changes})


@pytest.fixture
def copy(tiny_spm, tmp_path):
    return shutil.copytree(tiny_spm, tmp_path / "copy")


def flip_byte(path, position):
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END)
        value = file.read(1)[0] ^ 1
        file.seek(position, os.SEEK_END)
        file.write(bytes([value]))


def test_place_and_date_of_the_files_do_not_matter(tiny_spm, copy):
    os.utime(copy / "model.safetensors", (0, 0))
    name = namespace(source_of(tiny_spm))
    assert len(name) == 32
    assert namespace(source_of(copy)) == name


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.bfloat16},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"rope": RopeConfig(theta=20_000.0)},
    ],
)
def test_settings_matter(change, tiny_spm):
    assert namespace(source_of(tiny_spm), **change) != namespace(source_of(tiny_spm))


@pytest.mark.parametrize("position", [-1, -100])
def test_weights_matter(position, tiny_spm, copy):
    flip_byte(copy / "model.safetensors", position)
    assert namespace(source_of(copy)) != namespace(source_of(tiny_spm))


def test_config_file_matters(tiny_spm, copy):
    path = copy / "config.json"
    path.write_text(path.read_text().replace('"initializer_range": 0.4', '"initializer_range": 0'))
    assert namespace(source_of(copy)) != namespace(source_of(tiny_spm))


def test_seed_of_dummy_weights_matters(tiny_spm):
    names = {namespace(source_of(tiny_spm, "dummy", seed=seed)) for seed in (0, 1)}
    names.add(namespace(source_of(tiny_spm)))
    assert len(names) == 3


def test_weights_of_a_gguf_file_matter(tiny_spm, tmp_path):
    path = write_gguf(tiny_spm, tmp_path / "tiny.gguf")
    before = namespace(source_of(path, "gguf"))
    assert namespace(source_of(path, "gguf")) == before
    flip_byte(path, -1)
    assert namespace(source_of(path, "gguf")) != before
