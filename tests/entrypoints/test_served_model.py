"""What is found out about a model before its weights are read."""

import os

import pytest

from octavo.config import EngineConfig, Environment
from octavo.entrypoints.served_model import load_served_model
from octavo.errors import ConfigError, ModelLoadError
from tests.models.gguf_files import write_gguf


def load(path, folder):
    environment = Environment(default_model=None, cache_dir=folder / "cache")
    return load_served_model(EngineConfig(model=str(path)), environment)


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
