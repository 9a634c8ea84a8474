"""``--help``, ``--help=all``, ``--help=GROUP`` and ``--help=WORD``."""

import difflib
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 100
INDENT = 14


class HelpAction(Action):
    """Prints what is asked for and ends the process; with ``is_long``, first an overview."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(
            option_strings,
            dest=SUPPRESS,
            default=SUPPRESS,
            nargs="?",
            metavar="WORD",
            help="this text; with a word, the group or the options of that name; all is everything",
        )
        self.is_long = False

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print and exit."""
        print(self._render(parser, values).rstrip("\n"), flush=True)
        parser.exit()

    def _render(self, parser: ArgumentParser, word: str | None) -> str:
        if word is None and self.is_long:
            return _render_overview(parser)
        if word is None or word == "all":
            return parser.format_help()
        return _render_section(parser, word.strip("-").replace("_", "-").lower())


def _render_overview(parser: ArgumentParser) -> str:
    """Return the names of all options by group, and how to learn more."""
    parts = [parser.format_usage(), f"{parser.description}\n"]
    for title, actions in _list_groups(parser).items():
        names = " ".join(action.option_strings[0] for action in actions)
        lines = textwrap.wrap(names, WIDTH - INDENT, break_on_hyphens=False)
        parts.append(f"{title:{INDENT}}" + f"\n{'':{INDENT}}".join(lines))
    parts.append(
        f"\n{parser.prog} --help=all says what they do; so does --help=WORD for a group,\n"
        "an option, or all options that have to do with the word."
    )
    return "\n".join(parts)


def _render_section(parser: ArgumentParser, word: str) -> str:
    groups = _list_groups(parser)
    for title, actions in groups.items():
        # vLLM calls its groups ModelConfig and the like.
        if word in (title.lower(), f"{title.lower()}config"):
            return _format(parser, title, actions)
    options = [action for actions in groups.values() for action in actions]
    exact = [action for action in options if f"--{word}" in action.option_strings]
    found = exact or [action for action in options if _mentions(action, word)]
    if not found:
        names = [*map(str.lower, groups), *(flag.strip("-") for flag in _list_flags(options))]
        near = difflib.get_close_matches(word, names, n=1)
        hint = f"; did you mean --help={near[0]}?" if near else "; --help=all shows everything"
        parser.error(f"no option has to do with {word!r}{hint}")
    return _format(parser, f"options with {word!r}", found)


def _list_groups(parser: ArgumentParser) -> dict[str, list[Action]]:
    """Return the options by group, without those that are hidden."""
    groups = {
        str(group.title): [
            action
            for action in group._group_actions
            if action.option_strings and action.help != SUPPRESS
        ]
        for group in parser._action_groups
    }
    return {title: actions for title, actions in groups.items() if actions}


def _list_flags(actions: Iterable[Action]) -> list[str]:
    return [flag for action in actions for flag in action.option_strings]


def _mentions(action: Action, word: str) -> bool:
    return any(word in text.lower() for text in (*action.option_strings, action.help or ""))


def _format(parser: ArgumentParser, title: str, actions: Sequence[Action]) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
