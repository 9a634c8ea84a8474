"""API process: conversations rendered into prompts by a chat template.

Templates run in transformers' immutable sandbox. A rendered text has its special tokens in it, so
it is encoded without adding any: there is one BOS if the template writes one.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from octavo.engine.prompt import EncodedPrompt
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequestError
from octavo.unicode import check_unicode

Message = Mapping[str, Any]
"""A role and a content, which is a string, a list of parts or None, in OpenAI's form."""
ContentFormat = Literal["auto", "string", "openai"]

_PROBE = "octavo-probe"
# A template is a program of the model's author or the user: these are the ways in which it fails.
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """How a conversation is rendered."""

    chat_template: str | None = None
    """Replaces the model's template."""
    content_format: ContentFormat = "auto"
    """What the template is given as content: strings, lists of parts (openai), or what it takes."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Any] | None = None
    """JSON schemas of functions, in OpenAI's form."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""


class ChatTemplate:
    """Renders conversations for one model."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._hf_tokenizer = tokenizer.hf_tokenizer
        self._chat_template = chat_template
        self._accepted: dict[str, frozenset[ContentFormat]] = {}

    def encode(
        self, messages: Sequence[Message], options: ChatOptions = ChatOptions()
    ) -> EncodedPrompt:
        """Render a conversation and encode it.

        Raises:
            InvalidRequestError: as ``render`` does, or nothing was rendered.
        """
        text = self.render(messages, options)
        check_unicode("messages", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise _refuse("the chat template renders these messages to nothing")
        return EncodedPrompt(np.asarray(token_ids, dtype=np.int32), text)

    def render(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> str:
        """Return the text of a conversation.

        Raises:
            InvalidRequestError: there is no template, the messages are malformed, or the template
                refuses them; then the message is the template's own.
        """
        _check_messages(messages)
        _check_options(options)
        template = self._find_template(options)
        content_format = options.content_format
        accepted = self._find_accepted(template) if content_format == "auto" else {content_format}
        prepared = [_prepare(message, accepted) for message in messages]
        try:
            return self._render(prepared, template, options)
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequestError(
                f"the chat template fails for these messages: {error}",
                parameter="messages",
                reason_code="chat_template_failed",
            ) from error

    def _find_template(self, options: ChatOptions) -> str:
        chosen = options.chat_template or self._chat_template
        if chosen is None and self._hf_tokenizer.chat_template is None:
            raise _refuse(
                "this model has no chat template: use completions, or start with --chat-template"
            )
        try:
            template: str = self._hf_tokenizer.get_chat_template(chosen, tools=options.tools)
        except ValueError as error:  # several templates and none is the default
            raise _refuse(str(error)) from error
        return template

    def _find_accepted(self, template: str) -> frozenset[ContentFormat]:
        """Find out by trying which forms of content the template can take."""
        if template not in self._accepted:
            forms: dict[ContentFormat, Any] = {
                "string": _PROBE,
                "openai": [{"type": "text", "text": _PROBE, "unread": f"{_PROBE}-unread"}],
            }
            self._accepted[template] = frozenset(
                name for name, content in forms.items() if self._accepts(template, content)
            )
        return self._accepted[template]

    def _accepts(self, template: str, content: Any) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}], template, ChatOptions())
        except _TEMPLATE_FAILURES:
            return False
        # A template that prints a list instead of looping over its parts shows all their fields.
        return _PROBE in text and f"{_PROBE}-unread" not in text

    def _render(self, messages: list[dict[str, Any]], template: str, options: ChatOptions) -> str:
        text = self._hf_tokenizer.apply_chat_template(
            messages,
            tools=options.tools,
            chat_template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **options.template_arguments,
        )
        assert isinstance(text, str)  # token ids only with tokenize=True
        return text


def read_chat_template(file_or_text: str | None) -> str | None:
    """Return the text of a template that is given as a file's name or as itself.

    Raises:
        ConfigError: it looks like a file's name, and there is no such file.
    """
    if file_or_text is None or "{" in file_or_text or "\n" in file_or_text:
        return file_or_text
    try:
        return Path(file_or_text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {file_or_text!r}, which is no template and cannot be read as a file:"
            f" {error}"
        ) from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise _refuse("messages must be a list with at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refuse("each message must have a role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise _refuse(
                f"content is of type {type(content).__name__}; it must be a string or a list"
            )


def _check_options(options: ChatOptions) -> None:
    _check_option_types(options)
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidRequestError(
            "continue_final_message excludes add_generation_prompt: set one of them to False",
            parameter="continue_final_message",
        )
    for name in options.template_arguments:
        if name in _RESERVED_ARGUMENTS:
            raise InvalidRequestError(
                f"chat_template_kwargs sets {name}, which is no variable of a template",
                parameter="chat_template_kwargs",
            )


def _check_option_types(options: ChatOptions) -> None:
    arguments, tools = options.template_arguments, options.tools
    expected = {
        "chat_template": (isinstance(options.chat_template, str | None), "a text or None"),
        "chat_template_content_format": (
            options.content_format in get_args(ContentFormat),
            f"one of {', '.join(get_args(ContentFormat))}",
        ),
        "tools": (
            tools is None or (isinstance(tools, list) and all(map(_is_tool, tools))),
            "a list of JSON schemas or functions, or None",
        ),
        "chat_template_kwargs": (
            isinstance(arguments, Mapping) and all(isinstance(name, str) for name in arguments),
            "a mapping from the names of variables to their values",
        ),
    }
    for name, (is_right, wanted) in expected.items():
        if not is_right:
            raise InvalidRequestError(f"{name} must be {wanted}", parameter=name)


def _is_tool(tool: object) -> bool:
    return isinstance(tool, Mapping) or callable(tool)


def _prepare(message: Message, accepted: AbstractSet[ContentFormat]) -> dict[str, Any]:
    """Bring content and tool calls into a form that the template takes, if they are not in one."""
    prepared = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_read_part(part) for part in content]
        parts = [{"type": "text", "text": text} for text in texts]
        prepared["content"] = parts if "openai" in accepted else "\n".join(texts)
    elif isinstance(content, str) and "string" not in accepted and "openai" in accepted:
        prepared["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _read_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise _refuse(f"a content part has type {kind!r}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refuse("a content part of type text must have a string as text")
    return text


def _prepare_tool_call(call: Any) -> Any:
    """Parse the arguments: clients send them as JSON text, templates write them as JSON again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _refuse("each tool call must have a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise _refuse(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="messages")


_RESERVED_ARGUMENTS = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
) | {"messages"}
