"""Sampling parameters: vLLM's names and defaults, and a refusal for every impossible value."""

import inspect

import msgspec
import pytest

from octavo import InvalidRequestError, RequestOutputKind, SamplingParams

NAN, INFINITY = float("nan"), float("inf")
ENORMOUS = 10**5_000  # Python refuses to write it out
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)


def refusal(**values):
    """The error that these values meet."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    return caught.value


def test_defaults_are_those_of_vllm():
    values = msgspec.structs.asdict(SamplingParams())
    assert {name: value for name, value in values.items() if value} == {
        "n": 1,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 16,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "length_penalty", "tempreature"])
def test_a_parameter_that_does_not_exist_is_a_type_error(name):
    assert name not in inspect.signature(SamplingParams).parameters
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 2.5),
        ("n", "3"),
        ("n", True),
        ("n", 1_000_000),
        ("presence_penalty", 2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", INFINITY),
        ("repetition_penalty", 1e-9),
        ("temperature", 1e39),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("min_tokens", 10**20),
        ("logprobs", 10**20),
        ("stop", ["x"] * 257),
        ("stop", "x" * 4_097),
        ("bad_words", ["x"] * 4_097),
        ("stop_token_ids", [2**31]),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stream_interval", 0),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ""),
        ("stop", ["fine", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-5]),
        ("logit_bias", {-1: 5.0}),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {3: NAN}),
        ("bad_words", [""]),
        ("bad_words", [7]),
        ("bad_words", "word"),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", "12"),
        ("logit_bias", [5]),
        ("output_kind", 1),
        ("temperature", 10**400),
        ("logit_bias", {3: 10**400}),
        *((name, value) for name in FLAGS for value in (1, "yes", NAN, [])),
    ],
)
def test_an_impossible_value_is_refused_by_its_name(name, value):
    error = refusal(**{name: value})
    assert error.parameter == name
    assert error.message.startswith(f"{name} is ")


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@pytest.mark.parametrize(
    "value",
    [ENORMOUS, [ENORMOUS], {ENORMOUS: 1.0}, ["x" * 5_000], object()],
    ids=["number", "list", "mapping", "text", "object"],
)
def test_a_refusal_is_short_and_names_the_parameter_whatever_the_value(name, value):
    error = refusal(**{name: value})
    assert error.parameter == name
    assert len(str(error)) < 250


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair_is_no_text(name):
    error = refusal(**{name: ["fine", "a\ud83d"]})
    assert error.parameter == name
    assert "'\\ud83d' at position 1" in str(error)


def test_a_refusal_names_the_value_and_what_is_allowed():
    assert str(refusal(top_p=1.5)) == "top_p is 1.5; it must be in (0, 1]"
    assert str(refusal(max_tokens=0)) == "max_tokens is 0; it must be in [1, 2147483647]"
    assert str(refusal(temperature=-1)) == "temperature is -1; it must be in [0, 1e+06]"


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
    ],
)
def test_values_that_exclude_each_other_are_refused(values, parameter):
    assert refusal(**values).parameter == parameter


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"temperature": 0},
        {"temperature": 1e-30},
        {"max_tokens": None, "min_tokens": 100},
        {"min_tokens": 4, "max_tokens": 4},
        {"logprobs": -1},
        {"seed": -(2**63)},
        {"n": 16_384},
        {"max_tokens": 0, "prompt_logprobs": 0},
    ],
)
def test_values_on_the_border_are_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-30, True), (1e-6, True), (1e-4, False), (1, False)]
)
def test_a_tiny_temperature_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, []), ("end", ["end"]), (["a", "b"], ["a", "b"])]
)
def test_stop_strings_are_a_list_however_they_were_given(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_seed_minus_one_is_no_seed():
    assert SamplingParams(seed=-1) == SamplingParams()


def test_a_clone_is_equal_and_independent():
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, seed=7)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[4] = 2.0
    assert (params.stop, params.logit_bias) == (["a"], {3: 1.0})


def test_a_value_that_was_changed_later_is_found_by_validate():
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(InvalidRequestError, match="top_p is 7"):
        params.validate()
