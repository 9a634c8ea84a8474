"""In what order the parts of an offline engine are loaded, and what is left when one fails."""

from concurrent.futures import Future

import pytest

from octavo.config import EngineConfig
from octavo.entrypoints import llm
from octavo.errors import ConfigError
from octavo.models import hub
from tests.entrypoints import offline


class FakeCore:
    """Knows what was done with it, and whether the front end had been loaded when it came."""

    info = None
    is_shut_down = False

    def __init__(self, loading):
        self.was_loaded = loading.done()

    def shutdown(self):
        self.is_shut_down = True


def start(monkeypatch, device):
    """Start an engine whose tokenizer turns out to be broken; returns the cores that were made."""
    cores, loading = [], Future()

    def create_fake(config, source):
        cores.append(FakeCore(loading))
        loading.set_exception(ConfigError("no tokenizer"))
        return cores[-1]

    monkeypatch.setattr(llm, "create_core", create_fake)
    if device == "cpu":
        loading.set_exception(ConfigError("no tokenizer"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.create_engine(EngineConfig(device=device), None, loading)
    return cores


def test_a_gpu_starts_before_the_tokenizer_is_loaded(monkeypatch):
    (core,) = start(monkeypatch, "cuda")
    assert not core.was_loaded
    assert core.is_shut_down


def test_a_cpu_measures_its_threads_after_the_tokenizer_is_loaded(monkeypatch):
    assert start(monkeypatch, "cpu") == []


def test_a_model_of_the_hub_is_asked_for_once(monkeypatch, tiny_spm):
    asked = []

    def fetch(repository, **options):
        asked.append(repository)
        return tiny_spm

    monkeypatch.setattr(hub, "fetch", fetch)
    with offline.start("someone/tiny") as model:
        assert offline.generate(model, max_tokens=1).finished
    assert asked == ["someone/tiny"]
