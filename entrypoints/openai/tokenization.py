"""POST /tokenize and /detokenize: text to token ids and back, as the engine itself does it."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from octavo.engine.prompt_encoder import LONG_PROMPT_CHARACTERS
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.http.request_body import read_body
from octavo.entrypoints.openai.conversations import Documents, ReasoningEffort, render_conversation
from octavo.entrypoints.openai.fields import JsonBody, Refused, report_ignored_fields
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError

MIN_TEXT_LIMIT = 1_000_000
CHARACTERS_PER_TOKEN = 8
"""A text may have that many for each token of the longest request, if it is more: a million take a
thread two seconds and 300 MB."""
NUM_SLOW_TEXTS = 2
"""Worked on at a time off the event loop: prompts need threads there, too."""
MAX_SHOWN_DIGITS = 20
NEUTRAL_WITHOUT_MESSAGES = {"add_generation_prompt": True, "continue_final_message": False}


ONE_TEXT: JsonDict = {
    "oneOf": [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}},
        },
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}},
        },
    ]
}


class TokenizeRequest(JsonBody):
    """Body of /tokenize: a prompt or a conversation."""

    model_config = ConfigDict(json_schema_extra=ONE_TEXT)
    refused: ClassVar[Refused] = {
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "tools": ([],),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """True with a prompt unless it says otherwise, false with messages."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None
    """Also return each token as it stands in the vocabulary."""

    def check_fields(self) -> list[str]:
        """Return the names of unknown fields, which are ignored.

        Raises:
            InvalidRequestError: there is not exactly one text, or a field is not for it.
        """
        ignored = super().check_fields()
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", parameter="prompt")
        if self.messages is None:
            self._check_no_chat()
        return ignored

    def _check_no_chat(self) -> None:
        given = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs or None,
            "documents": self.documents or None,
            "reasoning_effort": self.reasoning_effort,
        }
        for name, value in given.items():
            if value is not None and value is not NEUTRAL_WITHOUT_MESSAGES.get(name):
                raise InvalidRequestError(f"{name} needs messages", parameter=name)


class TokenizeAnswer(BaseModel):
    """What /tokenize answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(JsonBody):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    """What /detokenize answers."""

    prompt: str


class TokenizationEndpoints:
    """Encodes and decodes with the tokenizer of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._info = service.engine.info
        longest = CHARACTERS_PER_TOKEN * self._info.max_tokens_per_request
        self._max_characters = max(MIN_TEXT_LIMIT, longest)
        self._turns = asyncio.Semaphore(NUM_SLOW_TEXTS)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        tokenizer = self._find_tokenizer()
        body = await read_body(request, TokenizeRequest)
        self._service.choose_model(body.model)
        headers = report_ignored_fields(body.check_fields())
        if body.messages is None:
            work = partial(self._tokenize, tokenizer, body.prompt or "", body)
            is_quick = len(body.prompt or "") <= LONG_PROMPT_CHARACTERS
            return _respond(work() if is_quick else await self._wait_for(work), headers)
        text = await render_conversation(self._service, body.messages, body)
        work = partial(self._tokenize, tokenizer, text, body)
        return _respond(await self._wait_for(work), headers)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        tokenizer = self._find_tokenizer()
        body = await read_body(request, DetokenizeRequest)
        self._service.choose_model(body.model)
        headers = report_ignored_fields(body.check_fields())
        work = partial(self._detokenize, tokenizer, body.tokens)
        is_quick = len(body.tokens) <= LONG_PROMPT_CHARACTERS
        return _respond(work() if is_quick else await self._wait_for(work), headers)

    def _find_tokenizer(self) -> Tokenizer:
        tokenizer = self._service.model.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("the engine runs without a tokenizer")
        return tokenizer

    async def _wait_for(self, work: Callable[[], bytes]) -> bytes:
        """Do something slow off the event loop."""
        async with self._turns:
            return await self._service.engine.prompts.run(work)

    def _tokenize(self, tokenizer: Tokenizer, text: str, body: TokenizeRequest) -> bytes:
        is_prompt = body.messages is None
        self._check_length(text, "prompt" if is_prompt else "messages")
        is_special = is_prompt if body.add_special_tokens is None else body.add_special_tokens
        token_ids = tokenizer.encode(text, add_special_tokens=is_special)
        answer = {
            "count": len(token_ids),
            "max_model_len": self._info.max_tokens_per_request,
            "tokens": token_ids,
            "token_strs": tokenizer.token_names(token_ids) if body.return_token_strs else None,
        }
        return msgspec.json.encode(answer)

    def _check_length(self, text: str, parameter: str) -> None:
        if len(text) > self._max_characters:
            raise InvalidRequestError(
                f"{parameter} has {len(text)} characters; at most {self._max_characters} are"
                " tokenized at once",
                parameter=parameter,
            )

    def _detokenize(self, tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
        limit = self._info.vocab_size
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < limit), None)
        if outside is not None:
            raise InvalidRequestError(
                f"tokens contains {str(outside)[:MAX_SHOWN_DIGITS]}; token ids of this model are"
                f" from 0 to {limit - 1}",
                parameter="tokens",
            )
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return msgspec.json.encode({"prompt": text})


def _respond(content: bytes, headers: dict[str, str]) -> Response:
    return Response(content, headers=headers, media_type="application/json")
