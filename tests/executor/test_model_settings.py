"""What the settings mean for a model, and which contradict it or the device."""

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor import model_settings
from octavo.executor.model_settings import find_integers, find_model_config
from tests.models.oracle import source_of


def test_a_file_of_four_bits_is_kept_so_unless_a_type_is_asked_for(tiny_spm, monkeypatch):
    monkeypatch.setattr(model_settings, "is_stored_in_int4", lambda source: True)
    monkeypatch.setattr(model_settings, "can_round", lambda name: True)
    source = source_of(tiny_spm)
    for settings, expected in [
        ({}, "int4"),
        ({"dtype": "float32"}, None),
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "fp8"}, None),
    ]:
        found = find_integers(EngineConfig(**settings), source, torch.device("cpu"))
        assert found == expected
    assert find_integers(EngineConfig(), source, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"quantization": "int8"}, "cuda", "is int8, which computes on a CPU: use fp8"),
        ({"quantization": "int4", "dtype": "bfloat16"}, "cpu", "dtype is bfloat16: leave dtype"),
    ],
)
def test_integers_that_do_not_fit_are_refused(settings, device, message, tiny_spm):
    with pytest.raises(ConfigError, match=message):
        find_integers(EngineConfig(**settings), source_of(tiny_spm), torch.device(device))


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_a_gpu_without_8_bit_floats_is_refused(setting, tiny_spm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = EngineConfig(**{setting: "fp8"})
    with pytest.raises(ConfigError, match=r"fp8, which needs .* 8\.9; this one has 8\.0"):
        find_model_config(config, source_of(tiny_spm), torch.device("cuda"))
