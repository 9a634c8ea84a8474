"""Token ids in, token ids out, and the routes that tell which ids a request is.

A router or a front end of its own renders a request once, and sends the ids where it likes:
``/v1/completions/render`` and ``/v1/chat/completions/render`` answer with what
``/inference/v1/generate`` takes. Both have vLLM's form.
"""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from fastapi import Request, Response
from pydantic import Field, ValidationError

from octavo.entrypoints.http.request_body import describe_invalid, read_body
from octavo.entrypoints.openai.chat import ChatCompletionRequest, ChatEndpoint
from octavo.entrypoints.openai.completions import CompletionRequest, CompletionsEndpoint
from octavo.entrypoints.openai.fields import JsonBody, Refused, report_ignored_fields
from octavo.entrypoints.openai.forms import Choice, Opening, ReplyShape
from octavo.entrypoints.openai.generation import Asked, Generation
from octavo.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.entrypoints.openai.protocol import (
    SAMPLING_FIELDS,
    StreamOptions,
    TokenIds,
)
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

PARAMETERS = (*SAMPLING_FIELDS, "logit_bias", "max_tokens", "logprobs", "prompt_logprobs")
"""Fields of ``sampling_params``, each with the meaning that it has in completions."""


class GenerateRequest(JsonBody):
    """Body of /inference/v1/generate."""

    refused: ClassVar[Refused] = {
        "ec_transfer_params": (),
        "features": (),
        "kv_transfer_params": (),
    }

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)

    def to_completion(self) -> CompletionRequest:
        """Return the same request to the other endpoint.

        Raises:
            InvalidRequestError: a value is impossible.
        """
        if not self.token_ids:
            raise InvalidRequestError("token_ids is empty", parameter="token_ids")
        for name in self.sampling_params:
            if name in CompletionRequest.model_fields and name not in PARAMETERS:
                raise InvalidRequestError(
                    f"sampling_params has {name}, which is no parameter of sampling",
                    parameter="sampling_params",
                )
        names = set(type(self).model_fields) - {"token_ids", "sampling_params"}
        own = self.model_dump(include=names)
        try:
            return CompletionRequest.model_validate(
                {**self.sampling_params, **own, "prompt": self.token_ids}
            )
        except ValidationError as error:
            raise describe_invalid(error) from None


class TokensForm:
    """The form of /inference/v1/generate: no text."""

    id_name = "request_id"
    id_prefix = ""
    object_name = "generation"
    chunk_object_name = "generation.chunk"

    def __init__(self, shape: ReplyShape, service: Service) -> None:
        self._shape = shape
        self._tokenizer = service.model.tokenizer

    def open_choice(self, choice: Choice, output: RequestOutput) -> Sequence[Opening]:
        """Return nothing: a choice begins with its first tokens."""
        return ()

    def write_chunk(self, choice: Choice, answer: CompletionOutput) -> bytes | None:
        """Return tokens."""
        if not answer.token_ids and not answer.finished:
            return None
        return msgspec.json.encode(self._describe(answer))[1:-1]

    def describe_choice(
        self, choice: Choice, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        """Return tokens."""
        return self._describe(answer)

    def describe_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the scores of the one prompt, if they were asked for."""
        if not self._shape.has_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs or ())}

    def _describe(self, answer: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self._shape.num_logprobs is not None:
            token_bytes = self._tokenizer.token_bytes if self._tokenizer else lambda _: b""
            name_token = self._shape.name_token
            num = self._shape.num_logprobs
            logprobs = chat_logprobs(answer, num, token_bytes, name_token=name_token)
        return {"token_ids": answer.token_ids, "logprobs": logprobs}


class TokensEndpoint:
    """Speaks of prompts and answers as token ids."""

    def __init__(
        self, service: Service, chat: ChatEndpoint, completions: CompletionsEndpoint
    ) -> None:
        self._service = service
        self._chat = chat
        self._completions = completions

    async def generate(self, request: Request) -> Response:
        """Continue token ids with token ids."""
        arrival_s = time.monotonic()
        body = await read_body(request, GenerateRequest)
        ignored = body.check_fields()
        asked = await self._completions.read(request, body.to_completion(), arrival_s)
        params = asked.params
        params.detokenize = bool(params.stop) or params.logprobs is not None
        asked.ignored_fields += ignored
        form = TokensForm(asked.body.reply_shape, self._service)
        return await Generation(asked, form).respond(self._service, request.receive)

    async def render_completion(self, request: Request) -> Response:
        """Return the requests to /inference/v1/generate that a completion is: one a prompt."""
        arrival_s = time.monotonic()
        body = await read_body(request, CompletionRequest)
        asked = await self._completions.read(request, body, arrival_s)
        return _respond(asked, list(_describe_all(asked, "cmpl")))

    async def render_chat(self, request: Request) -> Response:
        """Return the request to /inference/v1/generate that a chat is."""
        arrival_s = time.monotonic()
        body = await read_body(request, ChatCompletionRequest)
        asked = await self._chat.read(request, body, arrival_s)
        (described,) = _describe_all(asked, "chatcmpl")
        return _respond(asked, described)


def _describe_all(asked: Asked, prefix: str) -> list[dict[str, Any]]:
    options = asked.body.stream_options
    common = {
        "sampling_params": _describe_params(asked.params),
        "model": asked.model_name,
        "stream": bool(asked.body.stream),
        "stream_options": options.model_dump(exclude_none=True) if options else None,
        "cache_salt": asked.body.cache_salt,
        "priority": asked.body.priority or 0,
    }
    base = f"{prefix}-{asked.request_id}"
    return [
        {
            "request_id": base if len(asked.prompts) == 1 else f"{base}-{place}",
            "token_ids": prompt.token_ids.tolist(),
            **common,
        }
        for place, prompt in enumerate(asked.prompts)
    ]


def _describe_params(params: SamplingParams) -> dict[str, Any]:
    """Return every value: the defaults of whoever gets them may be others."""
    values = {name: getattr(params, name) for name in PARAMETERS}
    return {name: value for name, value in values.items() if value is not None} | {
        "max_tokens": params.max_tokens
    }


def _respond(asked: Asked, content: object) -> Response:
    headers = report_ignored_fields(asked.ignored_fields)
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
