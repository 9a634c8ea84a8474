"""How one request is sampled: vLLM's ``SamplingParams`` with its names and defaults.

An unsupported parameter is a ``TypeError`` of the constructor; an impossible value is an
``InvalidRequestError``.
"""

import enum
import math
import sys
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError
from octavo.unicode import check_unicode

MAX_N = 16_384
MAX_INTEGER = 2**31 - 1  # counts and ids are int32 on every device
MAX_FACTOR = 1e6  # logits multiplied or divided by it stay finite in float32
MAX_STOP_STRINGS = 256
MAX_BAD_WORDS = 4_096
MAX_TEXT_LENGTH = 4_096  # characters of one stop string or bad word
MAX_SHOWN_LENGTH = 100  # characters of a refused value in its message
GREEDY_TEMPERATURE = 1e-5  # below this the distribution is a point mass in every dtype we run
MIN_TEMPERATURE = (
    1e-2  # logits / T stays finite in float16 for |logits| < 655; vLLM raises T to the same bound
)


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(enum.Enum):
    """What each output of a streamed request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Parameters of one request.

    Raises:
        InvalidRequestError: a value is outside its range, or two values exclude each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None is as many as fit; 0, with ``prompt_logprobs`` alone, computes the prompt and stops."""
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Tokens of an answer that are collected for one output, after the first; None is 1."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        self.validate()
        if self.seed == -1:  # so has vLLM
            self.seed = None

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty when there are none."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def clone(self) -> "SamplingParams":
        """Return an independent copy."""
        return msgspec.convert(msgspec.to_builtins(self), SamplingParams)

    def validate(self) -> None:
        """Check every value; called by the constructor and again when a request is added."""
        _check_integer("n", self.n, 1, MAX_N)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
        _check_number("temperature", self.temperature, 0.0, MAX_FACTOR)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("top_k", self.top_k, -1, MAX_INTEGER)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_optional_integer("seed", self.seed, -(2**63), 2**63 - 1)
        fewest = 1 if self.prompt_logprobs is None else 0
        _check_optional_integer("max_tokens", self.max_tokens, fewest, MAX_INTEGER)
        _check_integer("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        _check_optional_integer("stream_interval", self.stream_interval, 1, MAX_INTEGER)
        _check_optional_integer("logprobs", self.logprobs, -1, MAX_INTEGER)
        _check_optional_integer("prompt_logprobs", self.prompt_logprobs, -1, MAX_INTEGER)
        self._validate_flags()
        self._validate_stops()
        self._validate_token_lists()
        self._validate_combinations()

    def _validate_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            raise _invalid(
                "skip_reading_prefix_cache", self.skip_reading_prefix_cache, "True, False or None"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _invalid("output_kind", self.output_kind, "a RequestOutputKind")

    def _validate_stops(self) -> None:
        if not isinstance(self.stop, str):
            _check_type("stop", self.stop, list, "a string or a list of strings")
        _check_texts("stop", self.stop_strings, MAX_STOP_STRINGS)
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are found in the text: set detokenize=True or use stop_token_ids",
                parameter="stop",
            )

    def _validate_token_lists(self) -> None:
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            _check_type(name, ids, list, "a list of token ids")
            for token_id in ids or []:
                _check_integer(name, token_id, 0, MAX_INTEGER)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _invalid("allowed_token_ids", [], "None or at least one token id")
        _check_type("logit_bias", self.logit_bias, dict, "a mapping from token id to bias")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_integer("logit_bias", token_id, 0, MAX_INTEGER)
            _check_number("logit_bias", bias, -sys.float_info.max, sys.float_info.max)
        _check_type("bad_words", self.bad_words, list, "a list of strings")
        _check_texts("bad_words", self.bad_words or [], MAX_BAD_WORDS)

    def _validate_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.n > 1 and self.is_greedy:
            raise _invalid("n", self.n, "1 with temperature 0: greedy answers would all be equal")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise _invalid(
                "skip_reading_prefix_cache",
                False,
                "True or None with prompt_logprobs: cached tokens have no logits",
            )


def _invalid(name: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {_show(value)}; it must be {allowed}", parameter=name)


def _show(value: object) -> str:
    """Write a value as Python does, cut: it may have any length."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def _check_type(name: str, value: object, kind: type, allowed: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise _invalid(name, value, allowed)


def _check_texts(name: str, texts: list[str], max_count: int) -> None:
    if len(texts) > max_count:
        raise InvalidRequestError(
            f"{name} is a list of {len(texts)} texts; it must be at most {max_count}",
            parameter=name,
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _invalid(name, text, "non-empty strings")
        if len(text) > MAX_TEXT_LENGTH:
            raise InvalidRequestError(
                f"{name} is a text of {len(text)} characters; it must be at most {MAX_TEXT_LENGTH}",
                parameter=name,
            )
        check_unicode(name, text)


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(name, value, "an integer")
    if value < low or (high is not None and value > high):
        raise _invalid(name, value, f"at least {low}" if high is None else f"in [{low}, {high}]")


def _check_optional_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if value is not None:
        _check_integer(name, value, low, high)


def _check_number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise _invalid(name, value, "a finite number")
    if value < low or value > high or (open_low and value == low):
        raise _invalid(name, value, f"in {'(' if open_low else '['}{low:g}, {high:g}]")
