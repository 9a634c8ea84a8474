"""API process: a model's chat template, and the prompts that it makes of conversations.

Templates run in a sandbox (``template_sandbox``), a server's in processes of their own as well. A
rendered text has its special tokens in it, so it is encoded without adding any: there is one BOS if
the template writes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from octavo.engine.conversation import ChatOptions, Message, check_conversation, refuse_messages
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.template_renderer import RenderJob, render
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.unicode import check_unicode

DEFAULT_OPTIONS = ChatOptions()


class ChatTemplate:
    """Renders conversations for one model."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._hf_tokenizer = tokenizer.hf_tokenizer
        self._chat_template = chat_template
        named: Mapping[str, object] = self._hf_tokenizer.special_tokens_map
        self._special_tokens = tuple(
            (name, token) for name, token in named.items() if isinstance(token, str)
        )

    def encode(
        self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS
    ) -> EncodedPrompt:
        """Render a conversation here and encode it.

        Raises:
            InvalidRequestError: as ``render`` does, or nothing was rendered.
        """
        text = self.render(messages, options)
        check_unicode("messages", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise refuse_messages("the chat template renders these messages to nothing")
        return EncodedPrompt(np.asarray(token_ids, dtype=np.int32), text)

    def render(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS) -> str:
        """Return the text of a conversation, rendered here, however long that takes.

        Raises:
            InvalidRequestError: there is no template, the messages are malformed, or the template
                refuses them; then the message is the template's own.
        """
        job = self.create_job(messages, options)
        try:
            return render(msgspec.convert(msgspec.to_builtins(job), RenderJob))
        except (TypeError, msgspec.ValidationError) as error:
            # A template is given plain data: methods of other objects may do anything.
            raise refuse_messages(f"the conversation must be plain data: {error}") from error

    def create_job(
        self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS
    ) -> RenderJob:
        """Return what there is to render.

        Raises:
            InvalidRequestError: there is no template, or the conversation is malformed.
        """
        check_conversation(messages, options)
        if options.tools is not None:
            options = replace(options, tools=[_describe_tool(tool) for tool in options.tools])
        return RenderJob(
            template=self._find_template(options),
            messages=[dict(message) for message in messages],
            options=options,
            special_tokens=self._special_tokens,
        )

    def _find_template(self, options: ChatOptions) -> str:
        chosen = options.chat_template or self._chat_template
        if chosen is None and self._hf_tokenizer.chat_template is None:
            raise refuse_messages(
                "this model has no chat template: use completions, or start with --chat-template"
            )
        try:
            template: str = self._hf_tokenizer.get_chat_template(chosen, tools=options.tools)
        except ValueError as error:  # several templates and none is the default
            raise refuse_messages(str(error)) from error
        return template


def _describe_tool(tool: Any) -> Any:
    """Return the JSON schema of a function; one that is given as a schema is left as it is."""
    if not callable(tool):
        return tool
    schemas = import_module("transformers.utils.chat_template_utils")  # seconds: not at a start
    try:
        return schemas.get_json_schema(tool)
    except Exception as error:  # whatever its docstring and hints lack
        raise InvalidRequestError(
            f"tools has a function that cannot be described: {error}", parameter="tools"
        ) from error
