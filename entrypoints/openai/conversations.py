"""The messages of a body to the text of a prompt, for chats and for counting their tokens."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import Field

from octavo.engine.conversation import ChatOptions, ContentFormat, Message
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import InvalidRequestError

Documents = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationBody(Protocol):
    """The fields of a body that say how its messages are rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None

    @property
    def reasoning_effort(self) -> str | None:
        """How much a model thinks, in one of a few words."""


async def render_conversation(
    service: Service, messages: Sequence[Message], body: ConversationBody
) -> str:
    """Return the text of a conversation, made in another process.

    Raises:
        InvalidRequestError: there is no template, or it refuses the messages.
        HttpError: too many conversations are being rendered (503).
    """
    template = service.model.chat_template
    if template is None:
        raise InvalidRequestError("the engine runs without a tokenizer: use /v1/completions")
    job = template.create_job(messages, choose_chat_options(body, service.settings))
    return await service.templates.render(job)


def choose_chat_options(body: ConversationBody, settings: ServerSettings) -> ChatOptions:
    """Return how messages are rendered: to be answered, unless the body says otherwise.

    Raises:
        InvalidRequestError: the body has a template, and clients' templates are not trusted.
    """
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is not supported by this server, which was started without"
            " --trust-request-chat-template: leave it out",
            parameter="chat_template",
            reason_code="unsupported_parameter",
        )
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return ChatOptions(
        chat_template=body.chat_template,
        content_format=cast(ContentFormat, settings.chat_template_content_format),
        add_generation_prompt=is_prompted(body),
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents or None,
        template_arguments={
            **(settings.default_chat_template_kwargs or {}),
            **(body.chat_template_kwargs or {}),
            **effort,
        },
        needed_arguments=tuple(effort),
    )


def is_prompted(body: ConversationBody) -> bool:
    """Say whether the rendered conversation ends with the beginning of an answer."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt
