"""POST /v1/completions: JSON to prompts and ``SamplingParams``."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from octavo.engine.prompt import EncodedPrompt, Prompt, TextPrompt, TokensPrompt
from octavo.entrypoints.http.request_body import read_body
from octavo.entrypoints.http.request_ids import choose_request_id
from octavo.entrypoints.openai.echo import Echo
from octavo.entrypoints.openai.fields import Refused
from octavo.entrypoints.openai.forms import CompletionForm
from octavo.entrypoints.openai.generation import Asked, Generation
from octavo.entrypoints.openai.protocol import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    GenerationRequest,
    Strings,
    TokenIds,
)
from octavo.entrypoints.openai.refused_fields import REFUSED_EVERYWHERE, REFUSED_IN_COMPLETIONS
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError

LONG_ECHO_TOKENS = 1_000
"""Longer echoes are spelled off the event loop."""


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    refused: ClassVar[Refused] = {**REFUSED_EVERYWHERE, **REFUSED_IN_COMPLETIONS}

    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)] | None = (
        None
    )
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report at each token; None reports nothing."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; null is as many as fit."""
        return self.max_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As for all; a prompt that is only to be repeated is computed for them too."""
        count = super().num_prompt_logprobs
        return 0 if count is None and self.echo and self.max_tokens == 0 else count

    @property
    def adds_special_tokens(self) -> bool:
        """True by default: prompts are bare texts."""
        return self.add_special_tokens is not False


class CompletionsEndpoint:
    """Continues prompts with one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Continue one prompt or several.

        Raises:
            InvalidRequestError: the request cannot be served as written.
            HttpError: there is no such model, or the server is ending.
        """
        arrival_s = time.monotonic()
        body = await read_body(request, CompletionRequest)
        asked = await self.read(request, body, arrival_s)
        form = CompletionForm(
            body.reply_shape,
            self._service.model.tokenizer,
            asked.prompts,
            skip_special_tokens=asked.params.skip_special_tokens,
            echoes=await self._read_echoes(body, asked.prompts) if body.echo else (),
        )
        return await Generation(asked, form).respond(self._service, request.receive)

    async def read(self, request: Request, body: CompletionRequest, arrival_s: float) -> Asked:
        """Check a body and encode its prompts; raises as ``create`` does."""
        service = self._service
        request_id = choose_request_id(request, body.request_id)
        model_name, ignored_fields = service.choose_model(body.model), body.check_fields()
        body.fill_in(service.settings)
        params = body.to_sampling_params(service.model.sampling_defaults)
        prompts = await service.engine.prompts.encode(
            _list_prompts(body, params.n), body.choose_encoding(service.engine.info)
        )
        return Asked(
            body=body,
            prompts=prompts,
            params=params,
            model_name=model_name,
            ignored_fields=ignored_fields,
            request_id=request_id,
            arrival_s=arrival_s,
        )

    async def _read_echoes(
        self, body: CompletionRequest, prompts: Sequence[EncodedPrompt]
    ) -> list[Echo]:
        tokenizer = self._service.model.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "echo needs a tokenizer, and the engine runs without one", parameter="echo"
            )
        is_text = isinstance(body.prompt, str) or isinstance((body.prompt or [0])[0], str)
        has_added = is_text and body.adds_special_tokens
        num_added = tokenizer.num_added_tokens if has_added else (0, 0)

        def read() -> list[Echo]:
            return [Echo.read(prompt, tokenizer, num_added) for prompt in prompts]

        if sum(len(prompt.token_ids) for prompt in prompts) <= LONG_ECHO_TOKENS:
            return read()
        return await self._service.engine.prompts.run(read)


def _list_prompts(body: CompletionRequest, num_answers: int) -> list[Prompt]:
    """Return the prompts; one may stand alone or in a list.

    Raises:
        InvalidRequestError: there is none, or there are more than one request may have.
    """
    given: Any = body.prompt
    is_single = isinstance(given, str) or bool(given and isinstance(given[0], int))
    prompts = [given] if is_single else given or []
    if not prompts or not all(prompt or isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequestError(
            "prompt is missing or empty; it must be a text, token ids, or a list of these",
            parameter="prompt",
        )
    if len(prompts) * num_answers > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {num_answers} answers each are more than {MAX_CHOICES}"
            " answers: send several requests",
            parameter="prompt" if len(prompts) > 1 else "n",
        )
    salt = body.cache_salt
    if isinstance(prompts[0], str):
        return [TextPrompt(prompt=text, cache_salt=salt) for text in prompts]
    return [TokensPrompt(prompt_token_ids=ids, cache_salt=salt) for ids in prompts]
