"""How the responses of the two endpoints differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.engine.prompt import EncodedPrompt
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.openai.echo import Echo
from octavo.entrypoints.openai.logprobs import (
    CompletionLogprobs,
    NameToken,
    TextOffsets,
    chat_logprobs,
    join_columns,
    name_by_id,
    name_by_text,
    prompt_logprobs,
)
from octavo.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyShape:
    """Read from a request's fields; a form decides where the things asked for stand."""

    num_logprobs: int | None = None
    """Alternatives to report at each token; None reports no log-probabilities."""
    has_echo: bool = False
    has_prompt_logprobs: bool = False
    has_prompt_text: bool = False
    """In chats alone: what the template has made of the messages."""
    has_token_ids: bool = False
    names_ids: bool = False
    """Whether tokens are called by their ids in the place of their texts."""

    @property
    def name_token(self) -> NameToken:
        """Return how tokens are called."""
        return name_by_id if self.names_ids else name_by_text


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer's place in a response."""

    index: int
    """Of the answer among all of the response: prompt * n + i."""
    prompt: int
    """Of its prompt among those of the request."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A chunk that stands before the text of a choice; members in JSON, as in ``write_chunk``."""

    members: bytes
    top_members: bytes = b""
    """Members of the chunk itself, each with a comma before it."""


class ResponseForm(Protocol):
    """What one endpoint's responses look like; one object for each response."""

    id_name: str
    """Of the member that carries the id."""
    id_prefix: str
    object_name: str
    chunk_object_name: str

    def open_choice(self, choice: Choice, output: RequestOutput) -> Sequence[Opening]:
        """Return what a stream sends of a choice before anything else of it."""

    def write_chunk(self, choice: Choice, answer: CompletionOutput) -> bytes | None:
        """Return the members of a chunk's choice between its index and its finish.

        None when there is nothing to send: text that is held back, and nothing else asked for.
        """

    def describe_choice(
        self, choice: Choice, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        """Return these members for a whole answer."""

    def describe_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return members of a whole response besides its choices."""


class ChatForm:
    """The form of /v1/chat/completions; ``echo`` stands before the answer's own text."""

    id_name = "id"
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        shape: ReplyShape,
        tokenizer: Tokenizer,
        prompt: EncodedPrompt,
        *,
        role: str = "assistant",
        echo: str = "",
    ) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._role = role
        self._echo = echo
        self._is_opened = False

    def open_choice(self, choice: Choice, output: RequestOutput) -> Sequence[Opening]:
        """Return the role, and the text that is repeated."""
        delta = msgspec.json.encode({"role": self._role, "content": ""})
        opening = Opening(b'"delta":' + delta + b',"logprobs":null', self._describe_first(output))
        if not self._echo:
            return (opening,)
        return opening, Opening(_write_delta(self._echo) + b',"logprobs":null')

    def write_chunk(self, choice: Choice, answer: CompletionOutput) -> bytes | None:
        """Return a delta."""
        shape = self._shape
        if shape.num_logprobs is None and not shape.has_token_ids:
            if not answer.text and not answer.finished:
                return None
            return _write_delta(answer.text) + b',"logprobs":null'
        logprobs = msgspec.json.encode(self._describe_logprobs(answer))
        members = _write_delta(answer.text) + b',"logprobs":' + logprobs
        return members + _write_token_ids(answer) if shape.has_token_ids else members

    def describe_choice(
        self, choice: Choice, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        """Return a message."""
        content = self._echo + answer.text
        members = {
            "message": {"role": self._role, "content": content, "refusal": None},
            "logprobs": self._describe_logprobs(answer),
        }
        return members | ({"token_ids": answer.token_ids} if self._shape.has_token_ids else {})

    def describe_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return what was asked for about the one prompt."""
        (output,) = outputs
        members = self._describe_prompt(output)
        if self._shape.has_prompt_logprobs:
            members["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        return members

    def _describe_first(self, output: RequestOutput) -> bytes:
        """Return what stands in the very first chunk alone."""
        members = {} if self._is_opened else self._describe_prompt(output)
        self._is_opened = True
        return b"," + msgspec.json.encode(members)[1:-1] if members else b""

    def _describe_prompt(self, output: RequestOutput) -> dict[str, Any]:
        members: dict[str, Any] = {}
        if self._shape.has_token_ids:
            members["prompt_token_ids"] = output.prompt_token_ids
        if self._shape.has_prompt_text:
            text, token_ids = self._prompt.text, self._prompt.token_ids.tolist()
            if text is None:  # it was cut
                text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            members["prompt_text"] = text
        return members

    def _describe_logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        shape = self._shape
        if shape.num_logprobs is None:
            return None
        token_bytes = self._tokenizer.token_bytes
        return chat_logprobs(answer, shape.num_logprobs, token_bytes, name_token=shape.name_token)


class CompletionForm:
    """The form of /v1/completions; ``echoes`` has one entry for each prompt that is repeated."""

    id_name = "id"
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        shape: ReplyShape,
        tokenizer: Tokenizer | None,
        prompts: Sequence[EncodedPrompt],
        *,
        skip_special_tokens: bool = True,
        echoes: Sequence[Echo] = (),
    ) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._skip_special_tokens = skip_special_tokens
        self._echoes = echoes
        self._logprobs = CompletionLogprobs(shape.num_logprobs or 0, name_token=shape.name_token)
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_columns: dict[int, dict[str, Any]] = {}

    def open_choice(self, choice: Choice, output: RequestOutput) -> Sequence[Opening]:
        """Return the prompt, if it is repeated, and its ids, if they were asked for."""
        shape = self._shape
        if not shape.has_echo and not shape.has_token_ids:
            return ()
        text = self._echoes[choice.prompt].text if shape.has_echo else ""
        members = b'"text":' + msgspec.json.encode(text)
        members += b',"logprobs":' + msgspec.json.encode(self._describe_prompt(choice, output))
        if shape.has_token_ids:
            members += b',"token_ids":[]' + _write_prompt_ids(output)
        return (Opening(members),)

    def write_chunk(self, choice: Choice, answer: CompletionOutput) -> bytes | None:
        """Return a text."""
        shape = self._shape
        text = b'"text":' + msgspec.json.encode(answer.text)
        if shape.num_logprobs is None and not shape.has_token_ids:
            if not answer.text and not answer.finished:
                return None
            return text + b',"logprobs":null'
        members = text + b',"logprobs":' + msgspec.json.encode(self._describe(choice, answer))
        return members + _write_token_ids(answer) if shape.has_token_ids else members

    def describe_choice(
        self, choice: Choice, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        """Return a text."""
        shape = self._shape
        text, logprobs = answer.text, self._describe(choice, answer)
        if shape.has_echo:
            text = self._echoes[choice.prompt].text + text
            logprobs = join_columns(self._describe_prompt(choice, output), logprobs)
        members: dict[str, Any] = {"text": text, "logprobs": logprobs}
        if shape.has_prompt_logprobs:
            members["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if shape.has_token_ids:
            members["token_ids"] = answer.token_ids
            members["prompt_token_ids"] = output.prompt_token_ids
        return members

    def describe_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return nothing: all stands in the choices."""
        return {}

    def _describe(self, choice: Choice, answer: CompletionOutput) -> dict[str, Any] | None:
        if self._shape.num_logprobs is None:
            return None
        if choice.index not in self._offsets:
            self._offsets[choice.index] = self._start_offsets(choice)
        return self._logprobs.describe_answer(answer, self._offsets[choice.index])

    def _describe_prompt(self, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        """Return the columns of the prompt as far as it is repeated.

        An output may have its scores for the first of its choices alone.
        """
        if self._shape.num_logprobs is None:
            return None
        if choice.prompt not in self._prompt_columns:
            self._prompt_columns[choice.prompt] = self._score_prompt(choice, output)
        return self._prompt_columns[choice.prompt]

    def _score_prompt(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        if not self._shape.has_echo:
            return self._logprobs.describe_prompt((), (), (), str)
        assert self._tokenizer is not None, "without a tokenizer nothing is repeated"
        scores, echo = output.prompt_logprobs or (), self._echoes[choice.prompt]
        token_text = self._tokenizer.token_text
        return self._logprobs.describe_prompt(
            output.prompt_token_ids, scores, echo.offsets, token_text
        )

    def _start_offsets(self, choice: Choice) -> TextOffsets:
        if self._tokenizer is None:
            return TextOffsets(None)
        decoder = self._tokenizer.create_decoder(skip_special_tokens=self._skip_special_tokens)
        decoder.prime(self._prompts[choice.prompt].token_ids.tolist())
        start = len(self._echoes[choice.prompt].text) if self._echoes else 0
        return TextOffsets(decoder, start)


def _write_delta(text: str) -> bytes:
    return b'"delta":{"content":' + msgspec.json.encode(text) + b"}"


def _write_token_ids(answer: CompletionOutput) -> bytes:
    return b',"token_ids":' + msgspec.json.encode(answer.token_ids)


def _write_prompt_ids(output: RequestOutput) -> bytes:
    return b',"prompt_token_ids":' + msgspec.json.encode(output.prompt_token_ids)
