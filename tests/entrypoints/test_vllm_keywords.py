import re

import pytest

from octavo.entrypoints.vllm_keywords import NEUTRAL_VALUES, SETTINGS, create_engine_config
from octavo.errors import ConfigError


def test_settings_pass_under_their_own_names():
    config = create_engine_config({"model": "m", "block_size": 32, "tensor_parallel_size": 1})
    assert (config.model, config.block_size) == ("m", 32)


def test_path_is_as_good_as_its_text(tmp_path):
    assert create_engine_config({"model": tmp_path}).model == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_model_len", "64", "max_model_len is '64': Expected `int | null`, got `str`"),
        ("seed", 16.5, "seed is 16.5: Expected `int`, got `float`"),
        ("enable_prefix_caching", 1, "enable_prefix_caching is 1: Expected `bool`, got `int`"),
        ("dtype", "int3", "dtype is 'int3'; it must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_value_of_another_type_is_refused_by_name(name, value, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        create_engine_config({name: value})


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_keyword_of_a_missing_feature_is_accepted_switched_off(name):
    for value in NEUTRAL_VALUES[name]:
        assert create_engine_config({name: value}) == create_engine_config({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "awq"),
        ("trust_remote_code", True),
        ("cpu_offload_gb", 4),
        ("pipeline_parallel_size", 2),
        ("enable_lora", True),
        ("hf_overrides", {"rope_theta": 1}),
        ("tensor_parallel_size", 2),
    ],
)
def test_missing_feature_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        create_engine_config({name: value})


def test_unknown_keyword_names_the_nearest_setting():
    with pytest.raises(TypeError, match="'max_model_length'; did you mean max_model_len"):
        create_engine_config({"max_model_length": 64})
    with pytest.raises(TypeError, match="'xyzzy'; docs/configuration"):
        create_engine_config({"xyzzy": 1})


def test_no_setting_is_listed_as_missing():
    assert not set(SETTINGS) & set(NEUTRAL_VALUES)
