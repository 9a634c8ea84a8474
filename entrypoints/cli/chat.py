"""``octavo chat``: a conversation with a running server."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.entrypoints.cli.http_client import (
    HttpClient,
    ServerError,
    add_connection_options,
    create_client,
)
from octavo.entrypoints.cli.options import add_sampling_options, get_sampling_parameters


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_client_options(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="say one thing, print the answer")
    add_sampling_options(parser)


def add_client_options(parser: ArgumentParser) -> None:
    """Add the options of the commands that let a server generate."""
    add_connection_options(parser)
    parser.add_argument("--model-name", metavar="NAME", help="model to use [the server's first]")


def run(args: Namespace) -> int:
    """Talk until the input ends."""
    client = create_client(args)
    model_name = args.model_name or client.get_first_model()
    fields = {"model": model_name, **get_sampling_parameters(args)}
    conversation = Conversation(client, fields, args.system_prompt)
    if args.quick:
        print_pieces(conversation.say(args.quick))
    else:
        print(f"Chatting with {model_name}; Ctrl-D ends.")
        converse(conversation.say)
    return 0


class Conversation:
    """Owns the messages so far; an answer that is broken off stays as far as it came."""

    def __init__(
        self, client: HttpClient, fields: Mapping[str, Any], system_prompt: str | None
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._client = client
        self._fields = fields
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def say(self, text: str) -> Iterator[str]:
        """Yield the pieces of the answer to a text."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            body = {**self._fields, "messages": self.messages}
            for event in self._client.stream("/chat/completions", body):
                piece = "".join(choice["delta"]["content"] for choice in event["choices"])
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def converse(answer: Callable[[str], Iterator[str]]) -> None:
    """Answer lines from the terminal until they end; Ctrl-C ends one answer."""
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        try:
            print_pieces(answer(text))
        except KeyboardInterrupt:
            print(" [stopped]")
        except ServerError as error:
            print(f"[{error}]")


def print_pieces(pieces: Iterator[str]) -> None:
    """Print text as it comes, and a line end."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
