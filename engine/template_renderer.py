"""No process of its own: a conversation to text by a chat template, in a server or for ``LLM``.

Loads no transformers: ``template_process`` starts in a tenth of a second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Template, TemplateError

from octavo.engine.conversation import (
    ChatOptions,
    ContentFormat,
    prepare_message,
    refuse_messages,
)
from octavo.engine.template_sandbox import compile_template
from octavo.errors import InvalidRequestError

MAX_TEXT_CHARACTERS = 2**25
"""Of a rendered conversation; a body has as many bytes at most."""

# A template is a program of the model's author or the user: these are the ways in which it fails.
TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
_PROBE = "octavo-probe"
_END_MARK = "octavo-end-of-the-final-message "
"""The space at its end tells whether the template cuts spaces off."""


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, checked, and the template that renders it."""

    template: str
    messages: list[dict[str, Any]]
    options: ChatOptions
    special_tokens: tuple[tuple[str, str], ...]
    """Variables such as ``bos_token``, and their values."""


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A template and what has been found out about it."""

    compiled: Template
    variables: frozenset[str]
    accepted: frozenset[ContentFormat]
    """The forms of content that it can take."""


def render(job: RenderJob) -> str:
    """Return the text of a conversation.

    Raises:
        InvalidRequestError: messages are malformed, or the template refuses them; then the message
            is the template's own.
    """
    try:
        return _render_known(_learn(job.template, job.special_tokens), job)
    except InvalidRequestError:
        raise
    except TEMPLATE_FAILURES as error:
        raise InvalidRequestError(
            f"the chat template fails for these messages: {error}",
            parameter="messages" if job.options.chat_template is None else "chat_template",
            reason_code="chat_template_failed",
        ) from error
    except MemoryError:
        raise refuse_cost("it needs too much memory") from None


def refuse_cost(reason: str) -> InvalidRequestError:
    """Return the refusal of what costs more than a conversation may."""
    return InvalidRequestError(
        f"the chat template cannot render these messages: {reason}",
        parameter="messages",
        reason_code="chat_template_too_slow",
    )


@lru_cache(maxsize=16)
def _learn(text: str, special_tokens: tuple[tuple[str, str], ...]) -> KnownTemplate:
    """Compile a template, and find out by trying which forms of content it can take."""
    compiled, variables = compile_template(text)
    forms: dict[ContentFormat, Any] = {
        "string": _PROBE,
        "openai": [{"type": "text", "text": _PROBE, "unread": f"{_PROBE}-unread"}],
    }
    accepted = frozenset(
        name for name, content in forms.items() if _accepts(compiled, content, special_tokens)
    )
    return KnownTemplate(compiled, variables, accepted)


def _accepts(compiled: Template, content: Any, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    messages = [{"role": "user", "content": content}]
    try:
        text = compiled.render(special_tokens, messages=messages, add_generation_prompt=True)
    except TEMPLATE_FAILURES:
        return False
    # A template that prints a list instead of looping over its parts shows all their fields.
    return _PROBE in text and f"{_PROBE}-unread" not in text


def _render_known(template: KnownTemplate, job: RenderJob) -> str:
    options = job.options
    _check_variables(template, options)
    is_open = options.content_format == "auto"
    accepted = template.accepted if is_open else frozenset({options.content_format})
    messages = [prepare_message(message, accepted) for message in job.messages]
    variables = dict(job.special_tokens) | dict(options.template_arguments)

    def fill() -> str:
        text = template.compiled.render(
            variables,
            messages=messages,
            tools=options.tools,
            documents=options.documents,
            add_generation_prompt=options.add_generation_prompt,
        )
        if len(text) > MAX_TEXT_CHARACTERS:
            raise refuse_cost(f"it writes more than {MAX_TEXT_CHARACTERS} characters")
        return text

    return _render_open(messages[-1], fill) if options.continue_final_message else fill()


def _check_variables(template: KnownTemplate, options: ChatOptions) -> None:
    """Refuse what the template would pass over, except further arguments: those are its own."""
    given = (*options.needed_arguments, *(["documents"] if options.documents else []))
    for name in given:
        if name not in template.variables:
            raise InvalidRequestError(
                f"the chat template does not read {name}: leave it out",
                parameter=name,
                reason_code="unsupported_parameter",
            )


def _render_open(final: dict[str, Any], fill: Callable[[], str]) -> str:
    """Return the text up to the end of the final message's own, without what would close it."""
    content: Any = final.get("content")
    own = content if isinstance(content, str) else content[-1]["text"] if content else None
    if own is None:
        raise refuse_messages("continue_final_message needs a final message with a text")
    marked = own + _END_MARK
    is_text = isinstance(content, str)
    final["content"] = marked if is_text else [*content[:-1], {**content[-1], "text": marked}]
    text = fill()
    end = text.rfind(_END_MARK.strip())
    if end < 0 or own.strip() not in text:
        raise refuse_messages("the chat template does not show the final message as it is")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
