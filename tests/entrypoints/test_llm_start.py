"""In what order the parts of an offline engine are loaded, and what is left when one fails."""

import os
import threading

import pytest

from octavo.config import EngineConfig
from octavo.entrypoints import llm
from octavo.errors import ConfigError
from octavo.models import hub
from tests.entrypoints import offline


class FakeStart:
    """A start of an engine whose front end turns out to be broken; knows what has been done."""

    def __init__(self, monkeypatch):
        self.done = []
        self.threads = set(threading.enumerate())
        self.new_threads_at_fork = []
        self.core_is_made = threading.Event()
        self.fork = os.fork
        monkeypatch.setattr(os, "fork", self.note_fork)
        monkeypatch.setattr(llm, "create_core", self.create_core)

    def run(self, device):
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.create_engine(EngineConfig(device=device), None, self.load)

    def note_fork(self):
        self.done.append("fork")
        self.new_threads_at_fork = set(threading.enumerate()) - self.threads
        return self.fork()

    def load(self):
        self.done.append("load")
        if "fork" in self.done:
            assert self.core_is_made.wait(10), "the core waits for the front end"
        raise ConfigError("no tokenizer")

    def create_core(self, config, source, compiler):
        self.done.append("create core")
        self.core_is_made.set()
        return self

    @property
    def info(self):
        return None

    def shutdown(self):
        self.done.append("shut down")


@pytest.fixture
def fake(monkeypatch):
    return FakeStart(monkeypatch)


def test_a_gpu_starts_while_the_tokenizer_is_loaded(fake):
    fake.run("cuda")
    assert sorted(fake.done[1:3]) == ["create core", "load"]
    assert fake.done[3:] == ["shut down"]


def test_no_other_thread_runs_when_the_process_that_compiles_is_forked(fake):
    """It would hold its locks in the fork for ever."""
    fake.run("cuda")
    assert fake.done[0] == "fork"
    assert fake.new_threads_at_fork == set()


def test_a_cpu_measures_its_threads_after_the_tokenizer_is_loaded(fake):
    fake.run("cpu")
    assert fake.done == ["load"]


def test_a_model_of_the_hub_is_asked_for_once(monkeypatch, tiny_spm):
    asked = []

    def fetch(repository, **options):
        asked.append(repository)
        return tiny_spm

    monkeypatch.setattr(hub, "fetch", fetch)
    with offline.start("someone/tiny") as model:
        assert offline.generate(model, max_tokens=1).finished
    assert asked == ["someone/tiny"]
