"""POST /v1/chat/completions: JSON to a prompt and ``SamplingParams``."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request, Response

from octavo.engine.chat import ChatOptions, Message
from octavo.engine.prompt import EncodedPrompt
from octavo.entrypoints.openai.forms import ChatForm
from octavo.entrypoints.openai.generation import Generation
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.openai.request_body import read_body
from octavo.entrypoints.openai.request_ids import choose_request_id
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError


class ConversationBody(Protocol):
    """The fields of a body that say how its messages are rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def render_conversation(
    service: Service, messages: Sequence[Message], body: ConversationBody
) -> str:
    """Return the text of a conversation, made off the event loop.

    Raises:
        InvalidRequestError: there is no template, or it refuses the messages.
    """
    template = service.model.chat_template
    if template is None:
        raise InvalidRequestError("the engine runs without a tokenizer: use /v1/completions")
    options = choose_chat_options(body)
    return await service.engine.run_off_loop(partial(template.render, messages, options))


def choose_chat_options(body: ConversationBody) -> ChatOptions:
    """Return how messages are rendered: to be answered, unless the body says otherwise."""
    is_continued = bool(body.continue_final_message)
    is_prompted = (
        not is_continued if body.add_generation_prompt is None else body.add_generation_prompt
    )
    return ChatOptions(
        add_generation_prompt=is_prompted,
        continue_final_message=is_continued,
        template_arguments=body.chat_template_kwargs or {},
    )


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
        request_id = choose_request_id(request, body.request_id)
        service, model = self._service, self._service.model
        if model.tokenizer is None or model.chat_template is None:
            raise InvalidRequestError("the engine runs without a tokenizer: use /v1/completions")
        model_name, ignored_fields = service.choose_model(body.model), body.check_fields()
        params = body.to_sampling_params(model.sampling_defaults)
        prompt = await self._encode(body)
        echo = _read_echo(body) if body.echo else ""
        generation = Generation(
            request_id=request_id,
            model_name=model_name,
            ignored_fields=ignored_fields,
            params=params,
            prompts=[prompt],
            form=ChatForm(body.reply_shape, model.tokenizer, role=body.answer_role, echo=echo),
            body=body,
            arrival_s=arrival_s,
        )
        return await generation.respond(service, request.receive)

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


def _read_echo(body: ChatCompletionRequest) -> str:
    """Return the text of the last message, if the answer goes on in its role."""
    last: Any = body.messages[-1]
    content = last.get("content")
    if last.get("role") != body.answer_role or content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in content)
