"""POST /v1/chat/completions: JSON to a prompt and ``SamplingParams``."""

import time
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from octavo.engine.conversation import Message, read_part
from octavo.engine.prompt import EncodedPrompt
from octavo.entrypoints.http.request_body import read_body
from octavo.entrypoints.http.request_ids import choose_request_id
from octavo.entrypoints.openai.conversations import (
    Documents,
    ReasoningEffort,
    is_prompted,
    render_conversation,
)
from octavo.entrypoints.openai.fields import Refused
from octavo.entrypoints.openai.forms import ChatForm, ReplyShape
from octavo.entrypoints.openai.generation import Asked, Generation
from octavo.entrypoints.openai.protocol import MAX_LOGPROBS, GenerationRequest
from octavo.entrypoints.openai.refused_fields import REFUSED_EVERYWHERE, REFUSED_IN_CHAT
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError


class ChatCompletionRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    refused: ClassVar[Refused] = {**REFUSED_EVERYWHERE, **REFUSED_IN_CHAT}

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_tokens: int | None = None
    """OpenAI's older name of ``max_completion_tokens``, which wins."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Needs a server that trusts the templates of its clients."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the template, which must read it."""
    return_prompt_text: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report at each token; None reports nothing."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", parameter="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; None is as many as fit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def adds_special_tokens(self) -> bool:
        """False by default: the template writes them."""
        return bool(self.add_special_tokens)

    @property
    def reply_shape(self) -> ReplyShape:
        """As for all; a chat can show its prompt, too."""
        return replace(super().reply_shape, has_prompt_text=bool(self.return_prompt_text))


class ChatEndpoint:
    """Answers conversations with one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer one conversation.

        Raises:
            InvalidRequestError: the request cannot be served as written.
            HttpError: there is no such model, or the server is ending.
        """
        arrival_s = time.monotonic()
        body = await read_body(request, ChatCompletionRequest)
        asked = await self.read(request, body, arrival_s)
        last, tokenizer = body.messages[-1], self._service.model.tokenizer
        assert tokenizer is not None, "messages were encoded"
        is_new = is_prompted(body)
        role = self._service.settings.response_role if is_new else str(last["role"])
        echo = _read_echo(last, role) if body.echo else ""
        form = ChatForm(body.reply_shape, tokenizer, asked.prompts[0], role=role, echo=echo)
        return await Generation(asked, form).respond(self._service, request.receive)

    async def read(self, request: Request, body: ChatCompletionRequest, arrival_s: float) -> Asked:
        """Check a body, render its conversation and encode it; raises as ``create`` does."""
        service, model = self._service, self._service.model
        request_id = choose_request_id(request, body.request_id)
        if model.tokenizer is None or model.chat_template is None:
            raise InvalidRequestError("the engine runs without a tokenizer: use /v1/completions")
        model_name, ignored_fields = service.choose_model(body.model), body.check_fields()
        body.fill_in(service.settings)
        params = body.to_sampling_params(model.sampling_defaults)
        return Asked(
            body=body,
            prompts=[await self._encode(body)],
            params=params,
            model_name=model_name,
            ignored_fields=ignored_fields,
            request_id=request_id,
            arrival_s=arrival_s,
        )

    async def _encode(self, body: ChatCompletionRequest) -> EncodedPrompt:
        """Render and encode a conversation."""
        engine = self._service.engine
        text = await render_conversation(self._service, body.messages, body)
        if not text:
            raise InvalidRequestError(
                "the chat template renders these messages to nothing", parameter="messages"
            )
        encoding = body.choose_encoding(engine.info)
        prompts = await engine.prompts.encode(
            [{"prompt": text, "cache_salt": body.cache_salt}], encoding
        )
        return prompts[0]


def _read_echo(last: Message, role: str) -> str:
    """Return the text of the last message, if the answer goes on in its role."""
    content = last.get("content")
    if last.get("role") != role or content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(map(read_part, content))
