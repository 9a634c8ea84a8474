"""``octavo explain``: what a running server knows of a request."""

import json
from argparse import ArgumentParser, Namespace
from urllib.parse import quote

from octavo.entrypoints.cli.http_client import add_connection_options, create_client


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("request_id", metavar="ID", help="the id of the response: cmpl-...")
    add_connection_options(parser)


def run(args: Namespace) -> int:
    """Print one block of facts for each choice of the request."""
    found = create_client(args).get(f"/requests/{quote(args.request_id, safe='')}")
    for facts in json.loads(found)["data"]:
        for name, value in facts.items():
            if value is not None:
                print(f"{name:22} {round(value, 4) if isinstance(value, float) else value}")
        print()
    return 0
