"""What is found out about a model before its weights are read."""

import json
import os
import shutil

import pytest

from octavo.config import EngineConfig, Environment
from octavo.entrypoints.served_model import load_served_model
from octavo.errors import ConfigError, ModelLoadError
from octavo.models.source import resolve_source
from tests.models.gguf_files import write_gguf


def load(path, folder, **settings):
    environment = Environment(default_model=None, cache_dir=folder / "cache")
    config = EngineConfig(model=str(path), **settings)
    return load_served_model(config, resolve_source(config, environment), environment)


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_cut_gguf_file_is_told_to_be_cut_and_not_to_lack_a_tokenizer(tiny_spm, tmp_path, kept):
    path = write_gguf(tiny_spm, tmp_path / "tiny.gguf")
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is cut: tensor .* ends at byte"):
        load(path, tmp_path)


def test_whole_file_without_a_usable_tokenizer_is_blamed_for_that(tiny_spm, tmp_path):
    path = write_gguf(tiny_spm, tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*tiny\.gguf"):
        load(path, tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"temperature": 0.1, "top_k": 1}),
        ({"generation_config": "vllm"}, {}),
        (
            {"override_generation_config": {"temperature": 0.5, "max_new_tokens": 7}},
            {"temperature": 0.5, "top_k": 1, "max_tokens": 7},
        ),
        ({"override_generation_config": {"temperature": None}}, {"top_k": 1}),
        (
            {"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}},
            {"top_p": 0.5},
        ),
    ],
)
def test_sampling_defaults_are_the_models_unless_they_are_replaced(
    tiny_spm, tmp_path, settings, expected
):
    folder = shutil.copytree(tiny_spm, tmp_path / "model")
    generation = {"temperature": 0.1, "top_k": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(folder, tmp_path, **settings).sampling_defaults == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [({"temprature": 1}, "'temprature'; it may have temperature"), ({"top_p": 7}, "top_p is 7")],
)
def test_default_that_cannot_be_is_refused_at_start(tiny_spm, tmp_path, override, words):
    with pytest.raises(ConfigError, match=words):
        load(tiny_spm, tmp_path, override_generation_config=override)
