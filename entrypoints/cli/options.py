"""Command-line options made from the settings and the sampling parameters. Loads no torch."""

import argparse
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.config import EngineConfig
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

KIND_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "switch",
    list[str]: "texts",
    list[int]: "integers",
}

_Group = argparse._ArgumentGroup  # argparse has no public name for it


def add_engine_options(parser: ArgumentParser) -> None:
    """Add an option for each setting of the engine."""
    group = parser.add_argument_group("engine settings")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        text, choices = field.metadata["help"], field.metadata["choices"]
        if field.default is not None:
            text = f"{text} [{field.default}]"
        _add_option(group, field.name, hints[field.name], text, choices)


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
    """Return the settings that the command line gives."""
    return _get_given(args, [field.name for field in fields(EngineConfig)])


def get_sampling_parameters(args: Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the command line gives."""
    return _get_given(args, SAMPLING_HELP)


def _add_option(
    group: _Group, name: str, hint: Any, text: str, choices: tuple[str, ...] = ()
) -> None:
    """Add one option. It has no default of its own, so that what was not given can be told."""
    flag = "--" + name.replace("_", "-")
    text = text.replace("%", "%%")
    kind = get_value_type(hint)
    form: dict[str, Any]
    if choices:
        form = {"choices": choices}
    elif kind is bool:
        form = {"action": BooleanOptionalAction}
    elif kind == list[str]:
        form = {"action": "append", "metavar": "TEXT"}
    elif kind == list[int]:
        form = {"type": _read_integers, "metavar": "INTEGER,..."}
    else:
        form = {"type": kind, "metavar": KIND_NAMES[kind].upper()}
    group.add_argument(flag, default=SUPPRESS, help=text, **form)


def _read_integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _get_given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    given = vars(args)
    return {name: given[name] for name in names if name in given}
