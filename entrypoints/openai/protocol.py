"""What the JSON bodies of the generation endpoints have in common; each has its own in its file.

A field of OpenAI's or vLLM's API is supported or refused (see ``fields``); docs/server.md has the
table.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.engine.messages import CoreInfo
from octavo.engine.prompt import MAX_CACHE_SALT_LENGTH, EncodeOptions
from octavo.entrypoints.openai.fields import JsonBody, Refused
from octavo.entrypoints.openai.forms import ReplyShape
from octavo.entrypoints.openai.refused_fields import (
    REFUSED_EVERYWHERE,
)
from octavo.entrypoints.openai.usage import UsageReports
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import InvalidRequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams

MAX_N = 128
MAX_CHOICES = 1_024
"""Answers of one request: prompts times n."""
MAX_LOGPROBS = 20
"""Alternatives that a client may ask for at each token."""

Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


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
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds after which the request ends with an error, waiting or running."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)
    """Shares cached blocks only with requests that have the same salt."""

    echo: bool | None = None
    """Puts the prompt, in chat the last message of the same role, before the answer."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many tokens of a prompt; -1 keeps as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = Field(None, ge=1)
    """Tokens that a stream collects for one chunk; the first comes alone."""

    n: int | None = Field(None, ge=1, le=MAX_N)
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
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives are wanted at each token of the prompt; None: not even its own."""
        if self.prompt_logprobs is None and self.echo:
            return self.num_logprobs
        return self.prompt_logprobs

    @property
    def usage_reports(self) -> UsageReports:
        """Where a stream says its usage."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and options.include_usage is not False:
            return UsageReports.IN_EVERY_CHUNK
        return UsageReports.AT_THE_END if options.include_usage else UsageReports.NOWHERE

    @property
    def reply_shape(self) -> ReplyShape:
        """What the response shows besides text."""
        return ReplyShape(
            num_logprobs=self.num_logprobs,
            has_echo=bool(self.echo),
            has_prompt_logprobs=self.prompt_logprobs is not None,
            has_token_ids=bool(self.return_token_ids),
            names_ids=bool(self.return_tokens_as_token_ids),
        )

    def choose_encoding(self, info: CoreInfo) -> EncodeOptions:
        """Return how prompts are read by the engine that ``info`` describes.

        Raises:
            InvalidRequestError: prompts would be cut to nothing, or to more than there can be.
        """
        return EncodeOptions(
            add_special_tokens=self.adds_special_tokens,
            max_tokens=self._choose_length(info.max_tokens_per_request),
            truncation_side=self.truncation_side or "left",
        )

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text gets BOS and the like from the tokenizer."""
        raise NotImplementedError

    def check_fields(self) -> list[str]:
        """Return the names of unknown fields, which are ignored.

        Raises:
            InvalidRequestError: a field that is not supported has a value that would matter, or
                two fields exclude each other.
        """
        ignored = super().check_fields()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options needs stream to be true", parameter="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are not sent in streams: leave out stream",
                parameter="prompt_logprobs",
                reason_code="unsupported_parameter",
            )
        return ignored

    def fill_in(self, settings: ServerSettings) -> None:
        """Let the server's own defaults stand where the request says nothing."""
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = settings.return_tokens_as_token_ids
        if self.stream_interval is None and settings.stream_interval > 1:
            self.stream_interval = settings.stream_interval
        if self.stream and settings.enable_force_include_usage:
            options = self.stream_options or StreamOptions()
            self.stream_options = options.model_copy(update={"include_usage": True})

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of this request; ``defaults`` hold where it says nothing.

        Raises:
            InvalidRequestError: a value is outside its range, or two values exclude each other.
        """
        fields = ((name, getattr(self, name)) for name in SAMPLING_FIELDS)
        given = {name: value for name, value in fields if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _read_logit_bias(self.logit_bias)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        if self.token_limit is not None:
            given["max_tokens"] = self.token_limit
        values = {"max_tokens": None, **defaults, **given}
        return SamplingParams(
            **values,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            output_kind=kind,
        )

    def _choose_length(self, limit: int) -> int | None:
        """Return the most tokens that a prompt keeps; None keeps all."""
        length = self.truncate_prompt_tokens
        if length == -1:
            most = 1 if self.token_limit is None else self.token_limit
            return limit - most if most < limit else limit - 1
        if length == 0 or (length is not None and length > limit):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {length}; it must be -1 or from 1 to {limit}, the"
                " longest request",
                parameter="truncate_prompt_tokens",
            )
        return length


def _read_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise InvalidRequestError(
                f"logit_bias has the key {name[:40]!r}; keys must be token ids",
                parameter="logit_bias",
            )
    return {int(name): bias for name, bias in biases.items()}


_MAX_ID_DIGITS = 10
SAMPLING_FIELDS = (
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
    "stream_interval",
)
