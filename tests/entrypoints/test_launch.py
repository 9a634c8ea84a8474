from pathlib import Path

import pytest
import torch

from octavo.config import EngineConfig
from octavo.entrypoints.launch import create_core, create_scheduler_config, resolve_config
from octavo.errors import ConfigError
from octavo.executor import model_settings, worker
from octavo.executor.step import ExecutorInfo
from octavo.models.source import ModelSource

INFO = ExecutorInfo(
    num_blocks=10,
    block_size=16,
    num_rows=8,
    vocab_size=345,
    max_model_len=128,
    cache_namespace=b"",
    dtype="float32",
    attention_backend="reference",
)


def resolve(**settings):
    return resolve_config(EngineConfig(**settings))


def test_a_cpu_gets_small_steps_read_at_once():
    config = resolve(device="cpu")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 1024)
    assert config.async_scheduling is False


def test_a_gpu_gets_large_steps_and_overlap():
    config = resolve(device="cuda")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (1024, 16_384)
    assert config.async_scheduling is True


def test_a_server_on_a_gpu_gets_shorter_steps():
    serving = [
        resolve_config(EngineConfig(device=device), is_serving=True).max_num_batched_tokens
        for device in ("cuda", "cpu")
    ]
    assert serving == [8192, 1024]


def test_what_the_user_says_is_kept():
    config = resolve(
        device="cuda", max_num_seqs=3, max_num_batched_tokens=40, async_scheduling=False
    )
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 40)
    assert config.async_scheduling is False


def test_device_is_found():
    assert resolve().device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_scheduler_plans_with_what_the_executor_measured():
    settings = resolve(device="cpu", schedule_conservativeness=0.5)
    config = create_scheduler_config(settings, INFO, is_serving=True)
    assert (config.num_blocks, config.block_size, config.max_num_seqs) == (10, 16, 8)
    assert (config.max_model_len, config.max_tokens_per_request) == (128, 128)
    assert config.conservativeness == 0.5


def test_no_more_requests_run_than_a_step_has_tokens(caplog):
    settings = resolve(device="cpu", max_num_batched_tokens=5)
    config = create_scheduler_config(settings, INFO, is_serving=True)
    assert config.max_num_seqs == 5
    assert "max_num_seqs is 5 instead of 8" in caplog.text


def test_policy_ranks_every_request_of_an_offline_batch():
    windows = [
        create_scheduler_config(resolve(device="cpu"), INFO, is_serving=is_serving).ranking_window
        for is_serving in (False, True)
    ]
    assert windows == [None, 128]


@pytest.fixture
def never_loading(monkeypatch):
    """Fail if anything of a model is read."""
    for name in ("load_config", "load_model", "load_rounded"):
        module = model_settings if name == "load_config" else worker
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it is loaded"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"journal": "/no/such/folder/journal"}, "journal is /no/such/folder/journal, which"),
        ({"journal": "/"}, "journal is /, which cannot be written"),
        ({"cuda_graph_sizes": [1]}, "cuda_graph_sizes is set, but the device is a CPU"),
        ({"attention_backend": "triton"}, "attention_backend is triton"),
    ],
)
def test_what_cannot_work_stops_the_start_before_the_model_is_read(
    settings, message, never_loading, tiny_spm
):
    config = resolve(device="cpu", num_gpu_blocks_override=4, **settings)
    source = ModelSource(name="tiny", path=tiny_spm, load_format="safetensors", seed=0)
    with pytest.raises(ConfigError, match=message):
        create_core(config, source)


def test_the_journal_is_closed_if_the_model_cannot_be_loaded(tmp_path):
    path = tmp_path / "journal"
    config = resolve(device="cpu", journal=str(path))
    source = ModelSource(name="tiny", path=tmp_path, load_format="safetensors", seed=0)
    with pytest.raises(ConfigError):
        create_core(config, source)
    opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert path not in opened
