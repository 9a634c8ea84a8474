"""``octavo replay``: a journal, taken again by this version's scheduler."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from octavo.engine.replay import read_journal, replay
from octavo.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("journal", type=Path, metavar="FILE", help="what --journal wrote")


def run(args: Namespace) -> int:
    """Compare every decision; a difference is an error that names the record."""
    if not args.journal.is_file():
        raise ConfigError(f"there is no file {args.journal}: give one that --journal wrote")
    print(f"{replay(read_journal(args.journal))} records, all decisions equal")
    return 0
