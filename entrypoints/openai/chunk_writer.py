"""The bytes of a stream's events, around members that are encoded once."""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.entrypoints.openai.failures import find_failure
from octavo.entrypoints.openai.forms import Choice, Opening, ResponseForm
from octavo.entrypoints.openai.usage import Usage, UsageReports
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

DONE = b"data: [DONE]\n\n"
NOT_FINISHED = b',"finish_reason":null'


class ChunkWriter:
    """Turns the outputs of one request into chunks."""

    def __init__(
        self,
        head: Mapping[str, Any],
        form: ResponseForm,
        usage: Usage,
        *,
        params: SamplingParams,
        reports: UsageReports = UsageReports.NOWHERE,
        num_prompts: int = 1,
    ) -> None:
        self.is_ended = False
        self.failure: dict[str, Any] | None = None
        """The error that was all that there was to say; the last event is it too."""
        self._form = form
        self._usage = usage
        self._reports = reports
        self._num_open = num_prompts
        self._num_answers = params.n
        self._needs_scores = params.prompt_logprobs is not None
        self._opened: set[int] = set()
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        has_null = reports is UsageReports.AT_THE_END
        self._tail = b',"usage":null}\n\n' if has_null else b"}\n\n"

    def write(self, prompt: int, output: RequestOutput) -> bytes:
        """Return the chunks of one output; after the last one, the end of the stream.

        The first answer that fails ends the stream for all, with an error in place of usage, behind
        the text that has come until then.
        """
        self._usage.note_prompt(prompt, output)
        is_complete = self._is_complete(prompt, output)
        pieces: list[bytes] = []
        failure = None
        for answer in output.outputs:
            failure = failure or find_failure(answer, is_complete=is_complete)
            if is_complete and (answer.text or answer.finish_reason != "error"):
                choice = Choice(prompt * self._num_answers + answer.index, prompt)
                self._write_answer(choice, output, answer, pieces)
        self._num_open -= output.finished
        if failure is not None:
            self.failure = None if self._opened else failure
            pieces.append(self._end(encode_event(failure)))
        elif self._num_open == 0:
            has_usage = self._reports is not UsageReports.NOWHERE
            pieces.append(self._end(self._describe_usage() if has_usage else b""))
        return b"".join(pieces)

    def _is_complete(self, prompt: int, output: RequestOutput) -> bool:
        """Say whether what a prompt's choices begin with is there, or was."""
        if not self._needs_scores or output.prompt_logprobs is not None:
            return True
        return any(index // self._num_answers == prompt for index in self._opened)

    def _end(self, last_event: bytes) -> bytes:
        self.is_ended = True
        return last_event + DONE

    def _describe_usage(self) -> bytes:
        totals = msgspec.json.encode(self._usage.describe())
        return self._head + b'],"usage":' + totals + b"}\n\n"

    def _write_answer(
        self,
        choice: Choice,
        output: RequestOutput,
        answer: CompletionOutput,
        pieces: list[bytes],
    ) -> None:
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            for opening in self._form.open_choice(choice, output):
                self._write_choice(choice.index, opening, NOT_FINISHED, pieces)
        self._usage.add(answer)
        members = self._form.write_chunk(choice, answer)
        if members is not None:
            chunk = Opening(members)
            self._write_choice(choice.index, chunk, _describe_finish(answer), pieces)

    def _write_choice(self, index: int, chunk: Opening, finish: bytes, pieces: list[bytes]) -> None:
        pieces += (
            self._head,
            b'{"index":%d,' % index,
            chunk.members,
            finish,
            b"}]",
            chunk.top_members,
            self._write_tail(),
        )

    def _write_tail(self) -> bytes:
        if self._reports is not UsageReports.IN_EVERY_CHUNK:
            return self._tail
        return b',"usage":' + msgspec.json.encode(self._usage.describe()) + b"}\n\n"


def encode_event(content: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _describe_finish(answer: CompletionOutput) -> bytes:
    if not answer.finished or answer.finish_reason == "error":
        return NOT_FINISHED  # an error is an event of its own
    finish = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    return b"," + msgspec.json.encode(finish)[1:-1]
