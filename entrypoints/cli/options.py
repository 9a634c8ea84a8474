"""Command-line options made from the settings and the sampling parameters. Loads no torch."""

import argparse
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

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
    "stop_token_ids": "token id that ends an answer; may be repeated",
    "bad_words": "text that is never generated; may be repeated",
    "ignore_eos": "go on after the model's own end",
    "include_stop_str_in_output": "keep the stop string in the answer",
    "skip_special_tokens": "leave special tokens out of the text",
}
"""The sampling parameters that have an option, and its help. ``--seed`` is the engine's setting."""

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
    kinds = set(get_args(hint) or (hint,)) - {type(None)}
    if kinds == {bool}:
        group.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS, help=text)
    elif choices:
        group.add_argument(flag, choices=choices, default=SUPPRESS, help=text)
    elif any(get_args(kind) for kind in kinds):  # a list, here of texts or integers
        (item,) = {item for kind in kinds for item in get_args(kind)}
        metavar = item.__name__.upper()
        group.add_argument(
            flag, type=item, action="append", metavar=metavar, default=SUPPRESS, help=text
        )
    else:
        (kind,) = kinds
        metavar = kind.__name__.upper()
        group.add_argument(flag, type=kind, metavar=metavar, default=SUPPRESS, help=text)


def _get_given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    given = vars(args)
    return {name: given[name] for name in names if name in given}
