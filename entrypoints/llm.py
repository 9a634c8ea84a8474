"""The offline class: prompts in, outputs out, with vLLM's names."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from octavo.config import EngineConfig, Environment
from octavo.engine.chat import ChatTemplate
from octavo.engine.conversation import ChatOptions, ContentFormat, Message
from octavo.engine.core_client import InProcessClient
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.prompt import EncodedPrompt, Prompt
from octavo.entrypoints.batch import BatchRequest, run_batch
from octavo.entrypoints.launch import create_core, resolve_config, start_compiler
from octavo.entrypoints.served_model import ServedModel, load_served_model
from octavo.entrypoints.vllm_keywords import create_engine_config
from octavo.errors import ConfigError, InvalidRequestError
from octavo.models.source import ModelSource, resolve_source
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams

Conversation = Sequence[Message]


class LLM:
    """A model in this process; calls of several threads take turns.

    Keywords are the settings of ``docs/configuration.md`` under vLLM's names. A keyword of vLLM for
    something that Octavo lacks is accepted at the value that switches it off.

    Raises:
        ConfigError: a setting, the model or this machine does not allow to start.
        TypeError: there is no such keyword.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = resolve_config(create_engine_config({"model": model, **settings}))
        environment = Environment.read()
        source = resolve_source(config, environment)
        load = partial(load_served_model, config, source, environment)
        self.llm_engine, self._model = create_engine(config, source, load)
        self._turn = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many and return their outputs in order.

        A text gets the special tokens that the tokenizer adds to every text. A text that already
        has them, such as a rendered chat, goes to ``chat``, or comes as token ids.
        ``sampling_params`` and ``priority`` are for all prompts or one for each.

        Raises:
            InvalidRequestError: a single prompt was refused.
            BatchRefusedError: some of many were refused; the others' outputs are in it.
            EngineDeadError: the engine has died; make a new one.
        """
        return self._run(_list_prompts(prompts), sampling_params, priority, use_tqdm=use_tqdm)

    def chat(  # noqa: PLR0913 - vLLM's keywords
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of messages, as ``generate`` does.

        The chat template writes all special tokens, BOS included.
        """
        options = ChatOptions(
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_arguments=chat_template_kwargs or {},
        )
        template = self._model.chat_template
        if template is None:
            raise ConfigError("chat needs a tokenizer: start without skip_tokenizer_init")
        prompts = [
            _encode_chat(template, conversation, options)
            for conversation in _list_conversations(messages)
        ]
        return self._run(prompts, sampling_params, None, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Any:  # its type takes seconds to import
        """Return the model's Hugging Face tokenizer."""
        if self._model.tokenizer is None:
            raise ConfigError("there is no tokenizer: start without skip_tokenizer_init")
        return self._model.tokenizer.hf_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no parameters are given: the model's own defaults."""
        return self._model.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget the K/V of earlier prompts; return whether nothing is left."""
        with self._turn:
            return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the device; nothing can be generated afterwards."""
        with self._turn:
            self.llm_engine.shutdown()

    def _run(
        self,
        prompts: Sequence[Prompt | InvalidRequestError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._spread_params(sampling_params, len(prompts))
        priorities = _spread_priority(priority, len(prompts))
        requests = [
            BatchRequest(prompt=prompt, params=params, priority=priority)
            for prompt, params, priority in zip(prompts, params, priorities, strict=True)
        ]
        with self._turn:
            return run_batch(self.llm_engine, requests, show_progress=use_tqdm)

    def _spread_params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [_final_only(sampling_params)] * num_prompts
        if not isinstance(sampling_params, list | tuple):
            raise _wrong_type("sampling_params", sampling_params, "SamplingParams or a list")
        if len(sampling_params) != num_prompts:
            raise _wrong_length("sampling_params", len(sampling_params), num_prompts)
        return [_final_only(params) for params in sampling_params]


def create_engine(
    config: EngineConfig, source: ModelSource, load: Callable[[], ServedModel]
) -> tuple[LLMEngine, ServedModel]:
    """Return an engine whose core runs in this process, and what ``load`` returns.

    On a GPU a thread calls ``load`` while kernels compile in other processes; on a CPU the core
    comes after it, for it measures how fast threads are. The settings are resolved.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
    """
    with ExitStack() as on_error, ThreadPoolExecutor(1) as thread:
        with start_compiler(config) as compiler:
            loading = thread.submit(load)
            if config.device == "cpu":
                loading.result()
            client = InProcessClient(create_core(config, source, compiler))
        on_error.callback(client.shutdown)
        model = loading.result()
        engine = LLMEngine(client, model.create_tracker(client.info))
        on_error.pop_all()
        return engine, model


def _list_prompts(prompts: Any) -> list[Prompt]:
    """Return a list of prompts; a list of integers is one prompt."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    is_text = isinstance(prompts, str | Mapping | EncodedPrompt)
    if not is_text and not isinstance(prompts, Sequence):
        raise _wrong_type("prompts", prompts, "a prompt or a list of prompts")
    is_single = is_text or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_single else list(prompts)


def _list_conversations(messages: Any) -> Sequence[Any]:
    """Return a list of conversations; a list of messages is one."""
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    return messages if is_list and not isinstance(messages[0], Mapping) else [messages]


def _spread_priority(priority: Any, num_prompts: int) -> list[int]:
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, list | tuple):
        raise _wrong_type("priority", priority, "a list of integers")
    if len(priority) != num_prompts:
        raise _wrong_length("priority", len(priority), num_prompts)
    return list(priority)


def _encode_chat(
    template: ChatTemplate, conversation: Any, options: ChatOptions
) -> EncodedPrompt | InvalidRequestError:
    try:
        return template.encode(conversation, options)
    except InvalidRequestError as error:
        return error


def _final_only(params: object) -> SamplingParams:
    """Return the parameters for a caller who sees nothing but the final output."""
    if not isinstance(params, SamplingParams):
        raise _wrong_type("sampling_params", params, "SamplingParams for each prompt")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _wrong_type(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} must be {wanted}, not of type {type(value).__name__}", parameter=name
    )


def _wrong_length(name: str, length: int, num_prompts: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} has {length} entries for {num_prompts} prompts: give one for each, or one for all",
        parameter=name,
    )
