"""API process: a conversation as clients send it, checked and brought into what templates take."""

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from octavo.errors import InvalidRequestError

Message = Mapping[str, Any]
"""A role and a content, which is a string, a list of parts or None, in OpenAI's form."""
ContentFormat = Literal["auto", "string", "openai"]

REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
"""What clients and templates call the reasoning of an earlier answer."""
RESERVED_NAMES = frozenset(
    {"messages", "conversation", "tools", "documents", "add_generation_prompt"}
    | {"continue_final_message", "chat_template", "tokenize"}
)
"""Variables of a template, or names easily taken for one, that have a field of their own."""


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
    documents: list[dict[str, Any]] | None = None
    """Texts that the answer is to be found in, for templates that show them."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""
    needed_arguments: tuple[str, ...] = ()
    """Those that came as fields of their own: the template must read them."""


def check_conversation(messages: object, options: ChatOptions) -> None:
    """Do nothing if messages and options have the right types and do not contradict each other.

    Raises:
        InvalidRequestError: they do not; names the field.
    """
    _check_messages(messages)
    _check_types(options)
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidRequestError(
            "continue_final_message excludes add_generation_prompt: set one of them to False",
            parameter="continue_final_message",
        )
    for name in options.template_arguments:
        if name in RESERVED_NAMES:
            raise InvalidRequestError(
                f"chat_template_kwargs sets {name}, which is no variable of a template",
                parameter="chat_template_kwargs",
            )


def prepare_message(message: Message, accepted: AbstractSet[ContentFormat]) -> dict[str, Any]:
    """Bring content, reasoning and tool calls into a form that the template takes.

    ``accepted`` are the forms of content that it can take. Null is the same as leaving out: many
    templates write None or fail.
    """
    prepared = {name: value for name, value in message.items() if value is not None}
    content = prepared.get("content")
    if isinstance(content, list):
        texts = [read_part(part) for part in content]
        parts = [{"type": "text", "text": text} for text in texts]
        prepared["content"] = parts if "openai" in accepted else "\n".join(texts)
    elif isinstance(content, str) and "string" not in accepted and "openai" in accepted:
        prepared["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    reasoning = next((prepared[name] for name in REASONING_NAMES if name in prepared), None)
    if reasoning is not None:
        prepared = dict.fromkeys(REASONING_NAMES, reasoning) | prepared
    return prepared


def read_part(part: Any) -> str:
    """Return the text of a content's part.

    Raises:
        InvalidRequestError: it is not text.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise refuse_messages(f"a content part has type {kind!r}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse_messages("a content part of type text must have a string as text")
    return text


def refuse_messages(message: str) -> InvalidRequestError:
    """Return the refusal of a conversation."""
    return InvalidRequestError(message, parameter="messages")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise refuse_messages("messages must be a list with at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise refuse_messages("each message must have a role")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise refuse_messages(
                f"content is of type {type(content).__name__}; it must be a string or a list"
            )
        if not isinstance(message.get("tool_calls"), list | tuple | None):
            raise refuse_messages("tool_calls must be a list")


def _check_types(options: ChatOptions) -> None:
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
        "documents": (_is_list_of_objects(options.documents), "a list of objects, or None"),
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


def _is_list_of_objects(documents: Sequence[object] | None) -> bool:
    if documents is None:
        return True
    return isinstance(documents, list) and all(isinstance(item, Mapping) for item in documents)


def _prepare_tool_call(call: Any) -> Any:
    """Parse the arguments: clients send them as JSON text, templates write them as JSON again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise refuse_messages("each tool call must have a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (json.JSONDecodeError, RecursionError) as error:
            raise refuse_messages(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
