"""``octavo generate``: complete prompts on this machine and print the text as it comes."""

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TextIO

import msgspec

import octavo
from octavo.entrypoints.cli.options import (
    add_engine_options,
    add_sampling_options,
    get_engine_settings,
    get_sampling_parameters,
)
from octavo.outputs import CompletionOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to be continued")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)


def run(args: Namespace) -> int:
    """Run all prompts together and print their answers in order; 1 if an answer has failed."""
    given = get_sampling_parameters(args)
    SamplingParams(**given)  # a mistake in them should not wait for the model
    with octavo.LLM(**get_engine_settings(args)) as llm:
        defaults = msgspec.structs.asdict(llm.get_default_sampling_params())
        params = SamplingParams(**{**defaults, **given, "output_kind": RequestOutputKind.DELTA})
        engine = llm.llm_engine
        for index, prompt in enumerate(args.prompts):
            engine.add_request(str(index), prompt, params)
        printer = AnswerPrinter(len(args.prompts) * params.n, sys.stdout)
        start_s, num_tokens = time.monotonic(), 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                for answer in output.outputs:
                    num_tokens += len(answer.token_ids)
                    printer.add(int(output.request_id) * params.n + answer.index, answer)
    passed_s = time.monotonic() - start_s
    speed = f"{num_tokens} tokens in {passed_s:.1f} s: {num_tokens / passed_s:.1f} tok/s"
    print(speed, file=sys.stderr)
    return 1 if printer.has_failed else 0


class AnswerPrinter:
    """Prints growing answers in order: the first unfinished one as it grows, others in their turn.

    Several answers are headed by their numbers.
    """

    def __init__(self, num_answers: int, stream: TextIO) -> None:
        self.has_failed = False
        self._stream = stream
        self._unprinted: list[str] = [""] * num_answers
        self._is_finished = [False] * num_answers
        self._current = 0
        self._print_heading()

    def add(self, position: int, piece: CompletionOutput) -> None:
        """Take the next piece of the answer at a position."""
        self._unprinted[position] += piece.text
        if piece.error is not None:
            self._unprinted[position] += f"\n[error: {piece.error}]"
            self.has_failed = True
        self._is_finished[position] |= piece.finished
        while self._current < len(self._unprinted):
            self._print(self._unprinted[self._current])
            self._unprinted[self._current] = ""
            if not self._is_finished[self._current]:
                return
            self._print("\n")
            self._current += 1
            self._print_heading()

    def _print_heading(self) -> None:
        if 1 < len(self._unprinted) > self._current:
            self._print(f"[{self._current + 1}]")

    def _print(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
