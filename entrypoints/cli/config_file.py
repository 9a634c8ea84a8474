"""``--config FILE``: a YAML file whose keys are the long names of flags."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from octavo.entrypoints.cli.options import SeveralTexts
from octavo.entrypoints.cli.parser import CommandParser
from octavo.errors import ConfigError


def read_config_file(path: str, parser: CommandParser) -> list[str]:
    """Return the arguments that a file stands for; null leaves a flag out.

    ``parser`` refuses values as it does on the command line; it knows the file's name.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    flags: dict[str, Any] = {}
    for key, value in _read_mapping(path).items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in parser.options or flag in ("--config", "--help"):
            parser.error(parser.describe_unknown_flag(flag))
        if flag in flags:
            parser.error(f"{flag} stands there twice, with - and with _")
        flags[flag] = value
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is not None:
            arguments += _write_flag(parser, flag, value)
    return arguments


def _read_mapping(path: str) -> dict[Any, Any]:
    try:
        data = Path(path).read_bytes()
        content = msgspec.yaml.decode(data)
    except OSError as error:
        raise ConfigError(f"config is {path}, which cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config is {path}, which is not YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config is {path}, which must have lines like max-model-len: 8k")
    keys = [key.value for key, _ in yaml.compose(data, yaml.SafeLoader).value]
    if twice := sorted(key for key in keys if keys.count(key) > 1):
        raise ConfigError(f"config is {path}, which has the key {twice[0]} twice")
    return content


def _write_flag(parser: CommandParser, flag: str, value: Any) -> Iterator[str]:
    """Yield the arguments for one key, in one piece where a value might look like a flag."""
    action = parser.options[flag]
    if "\0" in str(value):
        parser.error(f"{flag} has a character that no command line could have")
    if isinstance(value, bool):
        yield from _write_switch(parser, flag, is_on=value)
    elif action.nargs == 0:
        parser.error(f"{flag} is a switch; it must be true or false")
    elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
        for item in value:
            yield f"{flag}={_write_value(item)}"
    elif isinstance(value, list) and action.nargs == "+" and not isinstance(action, SeveralTexts):
        yield from (flag, *map(_write_value, value))
    else:
        yield f"{flag}={_write_value(value)}"


def _write_switch(parser: CommandParser, flag: str, *, is_on: bool) -> Iterator[str]:
    opposite = f"--no-{flag[2:]}"
    if parser.options[flag].nargs != 0:
        parser.error(f"{flag} takes a value; it must not be {str(is_on).lower()}")
    if is_on:
        yield flag
    elif opposite in parser.options:
        yield opposite


def _write_value(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
