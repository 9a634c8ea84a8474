"""POST /tokenize and /detokenize: text to token ids and back, as the engine itself does it."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from octavo.engine.chat import ChatTemplate
from octavo.engine.prompt_encoder import LONG_PROMPT_CHARACTERS
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.openai.chat import choose_chat_options
from octavo.entrypoints.openai.fields import JsonBody, Refused, report_ignored_fields
from octavo.entrypoints.openai.request_body import read_body
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
        "chat_template": (),
        "documents": ([],),
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
    chat_template_kwargs: dict[str, Any] | None = None
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
            "chat_template_kwargs": self.chat_template_kwargs or None,
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
        tokenizer, template = self._find_tokenizer()
        body = await read_body(request, TokenizeRequest)
        self._service.choose_model(body.model)
        headers = report_ignored_fields(body.check_fields())
        work = partial(self._tokenize, tokenizer, template, body)
        is_quick = body.prompt is not None and len(body.prompt) <= LONG_PROMPT_CHARACTERS
        return await self._respond(work, headers, is_quick=is_quick)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        tokenizer, _ = self._find_tokenizer()
        body = await read_body(request, DetokenizeRequest)
        self._service.choose_model(body.model)
        headers = report_ignored_fields(body.check_fields())
        work = partial(self._detokenize, tokenizer, body.tokens)
        is_quick = len(body.tokens) <= LONG_PROMPT_CHARACTERS
        return await self._respond(work, headers, is_quick=is_quick)

    def _find_tokenizer(self) -> tuple[Tokenizer, ChatTemplate]:
        model = self._service.model
        if model.tokenizer is None or model.chat_template is None:
            raise InvalidRequestError("the engine runs without a tokenizer")
        return model.tokenizer, model.chat_template

    async def _respond(
        self, work: Callable[[], bytes], headers: dict[str, str], *, is_quick: bool
    ) -> Response:
        if is_quick:
            content = work()
        else:
            async with self._turns:
                content = await self._service.engine.run_off_loop(work)
        return Response(content, headers=headers, media_type="application/json")

    def _tokenize(
        self, tokenizer: Tokenizer, template: ChatTemplate, body: TokenizeRequest
    ) -> bytes:
        if body.messages is not None:
            name, text = "messages", template.render(body.messages, choose_chat_options(body))
        else:
            name, text = "prompt", body.prompt or ""
        self._check_length(text, name)
        is_special = body.add_special_tokens
        if is_special is None:
            is_special = name == "prompt"
        token_ids = tokenizer.encode(text, add_special_tokens=is_special)
        names = tokenizer.token_names(token_ids) if body.return_token_strs else None
        answer = {
            "count": len(token_ids),
            "max_model_len": self._info.max_tokens_per_request,
            "tokens": token_ids,
            "token_strs": names,
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
