"""The ``octavo`` command.

Each sub-command is a module of this folder with ``add_arguments(parser)`` and ``run(args) -> int``.
Only the one that is called is imported, so that help takes no time.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from octavo import __version__
from octavo.config import import_only_what_is_installed, let_idle_threads_sleep
from octavo.entrypoints.cli.parser import EXIT_REFUSED, CommandParser
from octavo.errors import ConfigError, InvalidRequestError, OctavoError

COMMANDS = {
    "demo": "start a server with a small model and let four clients talk to it",
    "serve": "serve a model over an OpenAI-compatible API",
    "chat": "talk to a running server",
    "complete": "let a running server complete prompts",
    "explain": "ask a running server what a request waits for or has done",
    "replay": "take a scheduler's journal again and compare every decision",
    "generate": "complete prompts on this machine and print the text as it comes",
}
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    0 is success, 2 a mistake of the caller, 1 a failure of the engine, 130 Ctrl-C.
    """
    _open_missing_streams()
    let_idle_threads_sleep()
    import_only_what_is_installed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run_and_flush(arguments)
    except BrokenPipeError:  # whoever read the output has seen enough
        _abandon_output()
        return EXIT_INTERRUPTED
    except OSError as error:
        _abandon_output()
        return _fail(error.strerror or error, EXIT_FAILED)


def _open_missing_streams() -> None:
    """Open standard streams that the caller has closed, lest a socket gets one of their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the one that lacks
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _run_and_flush(arguments: Sequence[str]) -> int:
    """Run a command line and write all its output, where a failure can still be told."""
    try:
        return _run(arguments)
    finally:
        sys.stdout.flush()


def _run(arguments: Sequence[str]) -> int:
    args = _create_parser(chosen=arguments[0] if arguments else None).parse_args(arguments)
    command = import_module(f"octavo.entrypoints.cli.{args.command}")
    try:
        status: int = command.run(args)
    except (ConfigError, InvalidRequestError) as error:
        return _fail(error, EXIT_REFUSED)
    except OctavoError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _create_parser(chosen: str | None) -> CommandParser:
    """Return the parser; of the commands, only the chosen one knows its arguments."""
    parser = CommandParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        if name == chosen:
            import_module(f"octavo.entrypoints.cli.{name}").add_arguments(command)
    return parser


def _abandon_output() -> None:
    """Throw away what is still to be written: Python would try again at its end, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: OctavoError | OSError | str, status: int) -> int:
    print(f"octavo: {error}", file=sys.stderr)
    return status
