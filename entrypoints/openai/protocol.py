"""The JSON bodies of the generation endpoints, and what becomes of each field.

A field of OpenAI's or vLLM's API is supported or refused (see ``fields``); docs/server.md has the
table.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.engine.prompt import MAX_CACHE_SALT_LENGTH
from octavo.entrypoints.openai.fields import JsonBody, Refused
from octavo.errors import InvalidRequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
"""Alternatives that a client may ask for at each token."""

Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]

REFUSED_EVERYWHERE: Refused = {
    "echo": (False,),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
REFUSED_IN_CHAT: Refused = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
REFUSED_IN_COMPLETIONS: Refused = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    """Send one more chunk with the totals and no choices."""
    continuous_usage_stats: bool | None = None


class GenerationRequest(JsonBody):
    """What both endpoints have in common."""

    refused: ClassVar[Refused] = REFUSED_EVERYWHERE

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Accepted for OpenAI's sake; it changes nothing."""
    request_id: str | None = Field(None, max_length=256)
    """Becomes part of the response's id."""
    priority: int | None = None
    timeout: float | None = None
    """Seconds after which the request ends with an error, waiting or running."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)
    """Shares cached blocks only with requests that have the same salt."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report at each token; None reports nothing."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; None is as many as fit."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk of totals."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_fields(self) -> list[str]:
        """Return the names of unknown fields, which are ignored.

        Raises:
            InvalidRequestError: a field that is not supported has a value that would matter, or
                two fields exclude each other.
        """
        ignored = super().check_fields()
        if self.stream_options is not None:
            self._check_stream_options(self.stream_options)
        return ignored

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of this request; ``defaults`` hold where it says nothing.

        Raises:
            InvalidRequestError: a value is outside its range, or two values exclude each other.
        """
        fields = ((name, getattr(self, name)) for name in _SAMPLING_FIELDS)
        given = {name: value for name, value in fields if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _read_logit_bias(self.logit_bias)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        if self.token_limit is not None:
            given["max_tokens"] = self.token_limit
        values = {"max_tokens": None, **defaults, **given}
        return SamplingParams(**values, logprobs=self.num_logprobs, output_kind=kind)

    def _check_stream_options(self, options: StreamOptions) -> None:
        if not self.stream:
            raise InvalidRequestError(
                "stream_options needs stream to be true", parameter="stream_options"
            )
        if options.continuous_usage_stats:
            raise InvalidRequestError(
                "continuous_usage_stats is not supported by this server: use include_usage",
                parameter="stream_options",
            )


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    refused: ClassVar[Refused] = {**REFUSED_EVERYWHERE, **REFUSED_IN_COMPLETIONS}

    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)] | None = (
        None
    )
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report at each token; None reports nothing."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; null is as many as fit."""
        return self.max_tokens


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
    chat_template_kwargs: dict[str, Any] | None = None

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


def _read_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise InvalidRequestError(
                f"logit_bias has the key {name[:40]!r}; keys must be token ids",
                parameter="logit_bias",
            )
    return {int(name): bias for name, bias in biases.items()}


_MAX_ID_DIGITS = 10
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
