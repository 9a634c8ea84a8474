import json
from dataclasses import fields

import pytest

from octavo.config import EngineConfig
from octavo.entrypoints.cli import serve
from octavo.entrypoints.cli.parser import CommandParser
from octavo.entrypoints.cli.vllm_options import SHORT_FLAGS, list_missing
from octavo.entrypoints.server_settings import ServerSettings


def parse(*arguments):
    parser = CommandParser(prog="octavo serve")
    serve.add_arguments(parser)
    return vars(parser.parse_args(arguments))


def is_switch(name):
    return any(isinstance(value, bool) for value in list_missing()[name])


def write(name, value):
    """Return the arguments with which a value is given; None is the default of a switch."""
    flag = "--" + name.replace("_", "-")
    if is_switch(name):
        if value is None:
            return []
        return [flag if value else f"--no-{flag[2:]}"]
    return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]


@pytest.mark.parametrize("name", list_missing())
def test_flag_of_a_missing_feature_is_accepted_switched_off(name):
    for value in list_missing()[name]:
        assert parse(*write(name, value)) == {}
        assert parse(*write(name, value), "MODEL") == {"positional_model": "MODEL"}


@pytest.mark.parametrize("name", list_missing())
def test_flag_of_a_missing_feature_is_refused_otherwise(name, capsys):
    others = {True, False} - set(list_missing()[name]) if is_switch(name) else {"something-else"}
    for value in others:
        with pytest.raises(SystemExit) as caught:
            parse(*write(name, value))
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert f"{write(name, value)[0].partition('=')[0]} asks for something" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["-O3"],
        ["-dp", "2"],
        ["-ep"],
        ["--compilation-config", '{"mode": 3}'],
        ["--compilation-config.mode=3"],
        ["--speculative_config.method", "ngram"],
        ["--cpu-offload-gb"],
        ["--lora-modules", "a=b", "c=d"],
    ],
)
def test_every_way_to_ask_for_a_missing_feature_is_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "that Octavo does not have" in error
    assert error.count("\n") == 1


def test_short_flags_belong_to_missing_features():
    assert set(SHORT_FLAGS) <= set(list_missing())


def test_nothing_that_octavo_has_counts_as_missing():
    own = {field.name for settings in (EngineConfig, ServerSettings) for field in fields(settings)}
    assert not own & set(list_missing())


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["-tp", "1"], {"tensor_parallel_size": 1}),
        (["--max-num-queued-reqs", "7"], {"max_queued_requests": 7}),
        (["--max-num-queued-tokens", "7k"], {"max_queued_tokens": 7_000}),
        (["--cudagraph-capture-sizes", "1", "2", "4"], {"cuda_graph_sizes": [1, 2, 4]}),
        (["--disable-uvicorn-access-log"], {"access_log": False}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--dtype", "float"], {"dtype": "float32"}),
        (["-q", "fp8"], {"quantization": "fp8"}),
        (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
        (["--max-model-len", "auto"], {"max_model_len": None}),
        (["--max-model-len", "-1"], {"max_model_len": None}),
        (["--max-model-len", "25.6k"], {"max_model_len": 25_600}),
        (["--long-prefill-token-threshold", "0"], {"long_prefill_token_threshold": None}),
    ],
)
def test_vllms_other_words_are_understood(arguments, settings):
    assert parse(*arguments) == settings


def test_command_line_for_vllm_works_with_octavo():
    line = """org/model --host 0.0.0.0 --port=8001 --dtype bfloat16 --max-model-len 32k
        --gpu_memory_utilization 0.9 -tp 1 -pp 1 --served-model-name a b --max-num-seqs 256
        --max-num-batched-tokens 8K --enable-prefix-caching --enable-chunked-prefill --seed 0
        --api-key token-abc123 --disable-log-requests --uvicorn-log-level warning
        --generation-config vllm --kv-cache-dtype auto --swap-space 0 --cpu-offload-gb 0
        --trust-remote-code=false --enforce-eager --no-enable-log-requests"""
    with pytest.raises(SystemExit):  # a switch has no value, there and here
        parse(*line.split())
    assert parse(*line.replace("--trust-remote-code=false", "").split()) == {
        "positional_model": "org/model",
        "host": "0.0.0.0",
        "port": 8001,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 32_000,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "served_model_name": ("a", "b"),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "enable_prefix_caching": True,
        "seed": 0,
        "api_key": ["token-abc123"],
        "uvicorn_log_level": "warning",
        "generation_config": "vllm",
        "enforce_eager": True,
        "enable_log_requests": False,
    }
