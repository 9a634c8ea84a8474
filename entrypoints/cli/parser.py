"""The parser of every command: a mistake is one sentence and exit status 2."""

import difflib
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.entrypoints.cli.help import HelpAction

EXIT_REFUSED = 2


class CommandParser(ArgumentParser):
    """Takes flags with - and _ alike, and whole ones only.

    What it refuses it names without the value, which could be an API key.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **settings)
        self._help = self.add_argument("-h", "--help", action=HelpAction)

    @property
    def options(self) -> dict[str, Action]:
        """Every flag as it is written, and what it does."""
        return self._option_string_actions

    def shorten_help(self, usage: str) -> None:
        """Let plain ``--help`` name the options without what they mean."""
        self.usage = usage
        assert isinstance(self._help, HelpAction), f"--help is {self._help}"
        self._help.is_long = True

    def parse_known_args(  # type: ignore[override]  # its overloads are for other namespaces
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse everything; what is left over is refused by the command that it belongs to."""
        assert args is not None, "the command line is an argument"
        parsed, unknown = super().parse_known_args(normalize_flags(args), namespace)
        if unknown:
            self.error(self._describe_unknown(unknown))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        self.exit(EXIT_REFUSED, f"{self.prog}: {message}\n")

    def describe_unknown_flag(self, flag: str) -> str:
        """Say that there is no such flag, and which one may be meant."""
        parent = self.options.get(flag.partition(".")[0])
        if parent is not None and parent.help == SUPPRESS:
            return f"{flag} belongs to something that Octavo does not have: leave it out"
        shown = [name for name, action in self.options.items() if action.help != SUPPRESS]
        longer = [name for name in shown if name.startswith(flag)]
        near = longer or difflib.get_close_matches(flag, shown, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists what there is"
        return f"{flag} is not an option; {hint}"

    def _describe_unknown(self, unknown: Sequence[str]) -> str:
        flags = [token.partition("=")[0] for token in unknown if token.startswith("-")]
        if flags:
            return self.describe_unknown_flag(flags[0])
        surplus = "1 argument is" if len(unknown) == 1 else f"{len(unknown)} arguments are"
        return f"{surplus} too many; --help says what may stand where"


def normalize_flags(args: Sequence[str]) -> list[str]:
    """Write the names of flags with dashes; values, and everything after ``--``, stay."""
    end = args.index("--") if "--" in args else len(args)
    return [*map(_normalize_flag, args[:end]), *args[end:]]


def _normalize_flag(token: str) -> str:
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value
