"""POST /v1/chat/completions: JSON to a prompt and ``SamplingParams``."""

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from fastapi import Request, Response

from octavo.engine.chat import ChatOptions, ChatTemplate
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


def choose_chat_options(body: ConversationBody) -> ChatOptions:
    """Return how the messages of a body are rendered: to be answered, unless they say otherwise."""
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
        body = await read_body(request, ChatCompletionRequest)
        engine, model = self._service.engine, self._service.model
        if model.tokenizer is None or model.chat_template is None:
            raise InvalidRequestError("the engine runs without a tokenizer: use /v1/completions")
        encode = partial(_encode, model.chat_template, body)
        generation = Generation(
            request_id=choose_request_id(request, body.request_id),
            model_name=self._service.choose_model(body.model),
            ignored_fields=body.check_fields(),
            params=body.to_sampling_params(model.sampling_defaults),
            prompt=await engine.run_off_loop(encode),
            form=ChatForm(body.num_logprobs, model.tokenizer.token_bytes),
            body=body,
        )
        return await generation.respond(engine, request.receive)


def _encode(chat_template: ChatTemplate, body: ChatCompletionRequest) -> EncodedPrompt:
    """Render and encode a conversation; slow enough to be kept off the event loop."""
    prompt = chat_template.encode(body.messages, choose_chat_options(body))
    return replace(prompt, cache_salt=body.cache_salt)
