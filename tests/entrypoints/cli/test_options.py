from argparse import ArgumentParser
from dataclasses import fields

import pytest

from octavo.config import EngineConfig
from octavo.entrypoints.cli.options import (
    SAMPLING_HELP,
    add_engine_options,
    add_sampling_options,
    get_engine_settings,
    get_sampling_parameters,
)
from octavo.sampling_params import SamplingParams


@pytest.fixture
def parser():
    parser = ArgumentParser()
    add_engine_options(parser)
    add_sampling_options(parser)
    return parser


def test_only_what_is_given_is_set(parser):
    args = parser.parse_args([])
    assert get_engine_settings(args) == get_sampling_parameters(args) == {}


def test_options_have_the_types_of_the_settings(parser):
    args = parser.parse_args(
        [
            "--model",
            "m",
            "--block-size",
            "32",
            "--gpu-memory-utilization",
            "0.5",
            "--no-enable-prefix-caching",
            "--async-scheduling",
            "--load-format",
            "dummy",
        ]
    )
    settings = get_engine_settings(args)
    assert settings == {
        "model": "m",
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "load_format": "dummy",
    }
    EngineConfig(**settings)


def test_sampling_options_have_the_types_of_the_parameters(parser):
    args = parser.parse_args(
        [
            "--max-tokens",
            "5",
            "--temperature",
            "0.5",
            "--stop",
            "a",
            "--stop",
            "b",
            "--stop-token-ids",
            "7",
            "--ignore-eos",
        ]
    )
    given = get_sampling_parameters(args)
    assert given == {
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    SamplingParams(**given)


def test_every_setting_has_an_option_with_its_help(parser):
    text = " ".join(parser.format_help().split())
    for setting in fields(EngineConfig):
        assert "--" + setting.name.replace("_", "-") in text
        assert setting.metadata["help"].split(".")[0] in text


def test_value_outside_the_choices_is_refused(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "int3"])
    assert "invalid choice: 'int3'" in capsys.readouterr().err


def test_sampling_options_are_parameters():
    assert set(SAMPLING_HELP) <= set(SamplingParams.__struct_fields__)
