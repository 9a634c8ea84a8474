"""``octavo complete``: a running server goes on with what is typed."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from octavo.entrypoints.cli.chat import add_client_options, converse, print_pieces
from octavo.entrypoints.cli.http_client import create_client
from octavo.entrypoints.cli.options import add_sampling_options, get_sampling_parameters


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_client_options(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete one text and end")
    add_sampling_options(parser)


def run(args: Namespace) -> int:
    """Complete texts until the input ends."""
    client = create_client(args)
    model_name = args.model_name or client.get_first_model()
    fields = {"model": model_name, **get_sampling_parameters(args)}

    def complete(text: str) -> Iterator[str]:
        for event in client.stream("/completions", {**fields, "prompt": text}):
            for choice in event["choices"]:
                yield choice["text"]

    if args.quick:
        print_pieces(complete(args.quick))
    else:
        print(f"Completing with {model_name}; Ctrl-D ends.")
        converse(complete)
    return 0
