"""Command-line options made from settings and sampling parameters. Loads no torch."""

import argparse
import json
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from argparse import BooleanOptionalAction as Switch
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.config import EngineConfig
from octavo.entrypoints.cli.sizes import read_size
from octavo.entrypoints.server_settings import ServerSettings
from octavo.entrypoints.vllm_keywords import VALUE_ALIASES
from octavo.sampling_params import SamplingParams

SAMPLING_HELP = {
    "n": "answers to each prompt",
    "max_tokens": "most tokens of an answer",
    "min_tokens": "tokens before which an answer cannot end",
    "temperature": "0 always takes the most likely token",
    "top_p": "sample among the most likely tokens that together have this probability",
    "top_k": "sample among this many most likely tokens; 0 is all",
    "min_p": "sample among tokens at least this likely, relative to the most likely one",
    "presence_penalty": "lower the logits of tokens that were generated",
    "frequency_penalty": "lower the logits of tokens for each time they were generated",
    "repetition_penalty": "weaken the logits of tokens in the prompt or the answer",
    "stop": "text that ends an answer; may be repeated",
    "stop_token_ids": "token ids that end an answer",
    "bad_words": "text that is never generated; may be repeated",
    "ignore_eos": "go on after the model's own end",
    "include_stop_str_in_output": "keep the stop string in the answer",
    "skip_special_tokens": "leave special tokens out of the text",
}
"""The sampling parameters that have an option, and its help. ``--seed`` is the engine's setting."""

ENGINE_GROUPS = {
    "Model": (
        "model",
        "tokenizer",
        "revision",
        "tokenizer_revision",
        "hf_token",
        "load_format",
        "dtype",
        "quantization",
        "max_model_len",
        "seed",
        "skip_tokenizer_init",
        "chat_template",
        "generation_config",
        "override_generation_config",
    ),
    "Cache": (
        "block_size",
        "num_gpu_blocks_override",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "enable_prefix_caching",
    ),
    "Scheduler": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "scheduling_policy",
        "schedule_conservativeness",
        "min_deferral_tokens",
        "async_scheduling",
        "journal",
    ),
    "Device": (
        "device",
        "attention_backend",
        "enforce_eager",
        "cuda_graph_sizes",
        "tensor_parallel_size",
    ),
}
"""The engine's settings by the sections of the help; each stands in one of them."""

FLAG_ALIASES = {
    "max_header_bytes": ("--h11-max-incomplete-event-size",),
    "max_header_count": ("--h11-max-header-count",),
    "max_queued_requests": ("--max-num-queued-reqs",),
    "max_queued_tokens": ("--max-num-queued-tokens",),
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
}
"""vLLM's flags for settings that have another name here, or a short one there."""

KIND_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "switch",
    list[str]: "texts",
    list[int]: "integers",
    tuple[str, ...]: "texts",
    dict[str, Any]: "JSON",
}
AUTO = "auto"
"""How a number that is decided at start is asked for."""

_Group = argparse._ArgumentGroup  # argparse has no public name for it


def add_engine_options(parser: ArgumentParser) -> None:
    """Add an option for each setting of the engine."""
    hints = get_type_hints(EngineConfig)
    settings = {field.name: field for field in fields(EngineConfig)}
    for title, names in ENGINE_GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            field = settings[name]
            text = _describe(field.metadata["help"], field.default)
            _add_option(group, name, hints[name], text, field.metadata["choices"])


def add_server_options(parser: ArgumentParser) -> None:
    """Add an option for each setting of the server."""
    hints = get_type_hints(ServerSettings)
    groups: dict[str, _Group] = {}
    for field in fields(ServerSettings):
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = _describe(field.metadata["help"], field.default)
        _add_option(groups[title], field.name, hints[field.name], text, field.metadata["choices"])


def add_sampling_options(parser: ArgumentParser) -> None:
    """Add the options of the table above."""
    group = parser.add_argument_group("sampling parameters")
    hints = get_type_hints(SamplingParams)
    for name, text in SAMPLING_HELP.items():
        _add_option(group, name, hints[name], text)


def get_value_type(hint: Any) -> Any:
    """Return the type of a value that is given: of ``str | list[str] | None`` the list."""
    members = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    given = [member for member in members if member is not type(None)]
    return next((member for member in given if get_origin(member) is list), given[0])


def get_engine_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings of the engine that were given."""
    return _get_given(args, [field.name for field in fields(EngineConfig)])


def get_server_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings of the server that were given."""
    return _get_given(args, [field.name for field in fields(ServerSettings)])


def get_sampling_parameters(args: Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given."""
    return _get_given(args, SAMPLING_HELP)


class SeveralTexts(Action):
    """Collects texts: several after one flag, flags repeated, or JSON lists of them."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add to what the flag has been given before."""
        before = vars(namespace).get(self.dest, ())
        try:
            texts = [text for value in values for text in _read_texts(value)]
        except ValueError:
            parser.error(f"argument {option_string}: it takes texts, or a JSON list of them")
        setattr(namespace, self.dest, (*before, *texts))


def _add_option(
    group: _Group, name: str, hint: Any, text: str, choices: tuple[Any, ...] = ()
) -> None:
    """Add one option. It has no default of its own, so that what was not given can be told."""
    flags = ("--" + name.replace("_", "-"), *FLAG_ALIASES.get(name, ()))
    form = _choose_form(name, hint, choices)
    group.add_argument(*flags, dest=name, default=SUPPRESS, help=text.replace("%", "%%"), **form)


def _choose_form(name: str, hint: Any, choices: tuple[Any, ...]) -> dict[str, Any]:
    """Return how argparse is told to read the values of a setting."""
    kind = get_value_type(hint)
    forms: dict[Any, dict[str, Any]] = {
        bool: {"action": Switch},
        list[str]: {"action": "append", "metavar": "TEXT"},
        tuple[str, ...]: {"action": SeveralTexts, "nargs": "+", "metavar": "TEXT"},
        dict[str, Any]: {"type": _read_object, "metavar": "JSON"},
        list[int]: {"type": _read_integers, "metavar": "INTEGER,..."},
    }
    if kind in forms:
        return forms[kind]
    if choices:
        reader = _create_reader(name, type(choices[0]), is_optional=False)
        return {"type": reader, "choices": choices}
    reader = _create_reader(name, kind, is_optional=type(None) in get_args(hint))
    return {"type": reader, "metavar": KIND_NAMES[kind].upper()}


def _create_reader(name: str, kind: type, *, is_optional: bool) -> Callable[[str], Any]:
    """Return what makes a value of a text, or says what is wrong with it."""
    aliases = VALUE_ALIASES.get(name, {})

    def read(text: str) -> Any:
        if text == AUTO and is_optional and kind is not str:
            return None
        try:
            value = read_size(text) if kind is int else kind(text)
        except ValueError as error:
            said = str(error) if kind is int else f"{text!r} is not a number"
            raise ArgumentTypeError(said) from None
        return aliases.get(value, value)

    return read


def _read_integers(text: str) -> list[int]:
    try:
        return [read_size(item) for item in text.strip("[]").split(",")]
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"name": 1}}')
    return value


def _read_texts(text: str) -> list[str]:
    """Return the texts of a JSON list, or the text itself."""
    if not text.startswith("["):
        return [text]
    texts = json.loads(text)
    if not all(isinstance(item, str) for item in texts):
        raise ValueError(f"{text} is not a list of texts")
    return list(texts)


def _describe(text: str, default: Any) -> str:
    """Return the help of an option, with its default where it has one."""
    if default is None or default is MISSING or default == ():
        return text
    shown = " ".join(default) if isinstance(default, tuple) else default
    return f"{text} [{shown}]"


def _get_given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    given = vars(args)
    return {name: given[name] for name in names if name in given}
