"""``octavo serve``: an OpenAI-compatible server for one model."""

from argparse import SUPPRESS, Namespace
from importlib import import_module
from typing import Any

from octavo.config import EngineConfig
from octavo.entrypoints.cli.config_file import read_config_file
from octavo.entrypoints.cli.options import (
    add_engine_options,
    add_server_options,
    get_engine_settings,
    get_server_settings,
)
from octavo.entrypoints.cli.parser import CommandParser
from octavo.entrypoints.cli.vllm_options import add_vllm_options
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError

NAME = "octavo serve"


def add_arguments(parser: CommandParser) -> None:
    """Declare the command's arguments."""
    parser.shorten_help(usage=f"{NAME} [MODEL] [options]")
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        default=SUPPRESS,
        help="folder, .gguf file or Hub id; without one, the default model",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=SUPPRESS,
        help="YAML file with long names of options; the command line wins",
    )
    add_server_options(parser)
    add_engine_options(parser)
    add_vllm_options(parser)


def run(args: Namespace) -> int:
    """Serve until SIGTERM, Ctrl-C or the engine's death; 0, 0 or 1."""
    given = Namespace(**{**_read_file(args), **_read_command_line(args)})
    config = EngineConfig(**get_engine_settings(given))
    settings = ServerSettings(**get_server_settings(given))
    serving = import_module("octavo.entrypoints.serving")  # not for those who ask for help
    status: int = serving.serve(config, settings)
    return status


def _read_command_line(args: Namespace) -> dict[str, Any]:
    """Return what was given, with the model under its one name."""
    given = dict(vars(args))
    if "positional_model" in given:
        if "model" in given:
            raise ConfigError("the model is given twice, as MODEL and with --model")
        given["model"] = given.pop("positional_model")
    return given


def _read_file(args: Namespace) -> dict[str, Any]:
    if "config" not in args:
        return {}
    parser = CommandParser(prog=f"{NAME}: {args.config}")
    add_arguments(parser)
    return vars(parser.parse_args(read_config_file(args.config, parser)))
