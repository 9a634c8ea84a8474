"""Settings: each has a meaning, a range, and a message that helps."""

import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from octavo.config import EngineConfig, Environment, SchedulerConfig, let_idle_threads_sleep
from octavo.errors import ConfigError


def make_scheduler_config(**changes):
    values = {
        "num_blocks": 8,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
    }
    return SchedulerConfig(**values | changes)


def test_every_setting_says_what_it_is_in_one_sentence():
    for setting in fields(EngineConfig):
        text = setting.metadata["help"]
        assert text[0].isupper() or text.startswith("cuda"), setting.name
        assert text.endswith("."), setting.name


def test_choices_contain_the_default():
    for setting in fields(EngineConfig):
        choices = setting.metadata["choices"]
        assert not choices or setting.default in (None, *choices), setting.name


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_size", 0, "at least 1"),
        ("max_model_len", 0, "at least 1"),
        ("max_num_seqs", -1, "at least 1"),
        ("max_num_batched_tokens", 0, "at least 1"),
        ("num_gpu_blocks_override", 0, "at least 1"),
        ("kv_cache_memory_bytes", 0, "at least 1"),
        ("long_prefill_token_threshold", 0, "at least 1"),
        ("schedule_conservativeness", -0.5, "at least 0"),
        ("min_deferral_tokens", -1, "at least 0"),
        ("schedule_conservativeness", float("nan"), "a finite number"),
        ("schedule_conservativeness", float("inf"), "a finite number"),
        ("gpu_memory_utilization", float("nan"), "in (0, 1]"),
        ("cuda_graph_sizes", [], "at least 1: for no graphs set enforce_eager"),
        ("cuda_graph_sizes", [8, 0], "at least 1"),
        ("gpu_memory_utilization", 0, "in (0, 1]"),
        ("gpu_memory_utilization", 1.01, "in (0, 1]"),
        ("dtype", "int8", "one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "one of auto, cuda, cpu"),
        ("load_format", "pickle", "one of auto, safetensors, gguf, dummy"),
        ("scheduling_policy", "random", "one of fcfs, priority"),
        ("tensor_parallel_size", 2, "only 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_what_is_allowed(name, value, allowed):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}")
    assert allowed in str(caught.value)


@pytest.mark.parametrize("name", ["seed", "block_size", "max_model_len", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [2**63, 10**5_000], ids=["65 bits", "thousands of digits"])
def test_an_endless_integer_is_refused_without_writing_it_out(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be an integer of 64 bits$"):
        EngineConfig(**{name: value})


def test_a_setting_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineConfig(max_num_sequences=4)


def test_settings_cannot_change_after_the_start():
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1


@pytest.mark.parametrize(("max_model_len", "longest"), [(512, 128), (100, 100)])
def test_a_request_may_fill_the_pool_or_the_model_whichever_is_smaller(max_model_len, longest):
    assert make_scheduler_config(max_model_len=max_model_len).max_tokens_per_request == longest


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("OCTAVO_DEFAULT_MODEL", raising=False)
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert Environment.read() == Environment(None, Path("/somewhere/octavo"))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("OCTAVO_DEFAULT_MODEL", "/models/small.gguf")
    assert Environment.read() == Environment(Path("/models/small.gguf"), Path("/elsewhere"))


def test_without_any_variable_the_cache_is_in_the_home_folder(monkeypatch):
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Environment.read().cache_dir == Path("/home/somebody/.cache/octavo")


def test_without_a_home_folder_the_caller_is_told_what_to_set(monkeypatch):
    monkeypatch.setattr(Path, "home", refuse_home)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/elsewhere")
    assert Environment.read().cache_dir == Path("/elsewhere")
    monkeypatch.delenv("OCTAVO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ConfigError, match="set HOME or OCTAVO_CACHE_DIR"):
        Environment.read()


def refuse_home():
    raise RuntimeError("Could not determine home directory.")


def test_idle_threads_sleep_unless_the_user_decides(monkeypatch):
    for policy, expected, spins in (
        (None, "PASSIVE", "2000"),
        ("passive", "passive", "2000"),
        ("ACTIVE", "ACTIVE", None),
    ):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if policy is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        let_idle_threads_sleep()
        assert os.environ["OMP_WAIT_POLICY"] == expected
        assert os.environ.get("GOMP_SPINCOUNT") == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    let_idle_threads_sleep()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
