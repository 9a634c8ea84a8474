"""How the responses of the two endpoints differ, and the usage that they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.entrypoints.openai.logprobs import CompletionLogprobs, chat_logprobs
from octavo.outputs import CompletionOutput, RequestOutput


class ResponseForm(Protocol):
    """What one endpoint's responses look like; one object for each response."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    opening: bytes | None
    """Member that stands in the first chunk of each choice, in JSON."""

    def chunk_content(self, text: str) -> bytes:
        """Return the member of a chunk's choice that carries text, in JSON."""

    def content(self, text: str) -> dict[str, Any]:
        """Return the member of a choice that carries the whole text."""

    def logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of the answer's tokens; None if they were not asked for."""


class ChatForm:
    """The form of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    opening: bytes | None = b'"delta":{"role":"assistant","content":""}'

    def __init__(self, num_logprobs: int | None, token_bytes: Callable[[int], bytes]) -> None:
        self._num_logprobs = num_logprobs
        self._token_bytes = token_bytes

    def chunk_content(self, text: str) -> bytes:
        """Return a delta."""
        return b'"delta":{"content":' + msgspec.json.encode(text) + b"}"

    def content(self, text: str) -> dict[str, Any]:
        """Return a message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        """Return one entry for each token."""
        if self._num_logprobs is None:
            return None
        return chat_logprobs(answer, self._num_logprobs, self._token_bytes)


class CompletionForm:
    """The form of /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    opening: bytes | None = None

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs
        self._columns: dict[int, CompletionLogprobs] = {}

    def chunk_content(self, text: str) -> bytes:
        """Return a text."""
        return b'"text":' + msgspec.json.encode(text)

    def content(self, text: str) -> dict[str, Any]:
        """Return a text."""
        return {"text": text}

    def logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        """Return columns; the offsets go on from chunk to chunk."""
        if self._num_logprobs is None:
            return None
        if answer.index not in self._columns:
            self._columns[answer.index] = CompletionLogprobs(self._num_logprobs)
        return self._columns[answer.index].take(answer)


@dataclass(slots=True)
class Usage:
    """Token counts of one response, added up over its outputs."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count the tokens of an output that holds what is new (or all there is)."""
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.num_output_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def describe(self) -> dict[str, Any]:
        """Return the ``usage`` of a response."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "completion_tokens": self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
