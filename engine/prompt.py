"""API process: the forms in which a prompt may be given, read into token ids.

Does not know the engine's limits; ``request_tracker`` checks those.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.executor.step import Int32Array
from octavo.unicode import check_unicode

MAX_CACHE_SALT_LENGTH = 1024
LARGEST_ID = 2**31 - 1

TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How a prompt is read into token ids."""

    add_special_tokens: bool = True
    """Whether a text gets the tokens that the tokenizer adds to every text, such as BOS."""
    max_tokens: int | None = None
    """Keep at most this many tokens. A text keeps those that the tokenizer added."""
    truncation_side: TruncationSide = "left"
    """Where tokens are taken away."""


PLAIN = EncodeOptions()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it.

    ``text`` is None when the caller gave token ids alone, or when tokens were taken away.
    """

    token_ids: Int32Array  # (num_tokens,) not empty
    text: str | None = None
    cache_salt: str | None = None


class TextPrompt(TypedDict):
    """A prompt as text; ``cache_salt`` keeps its cached blocks apart from other salts'."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt`` may carry their text, which is handed back and not read."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EncodedPrompt


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    options: EncodeOptions = PLAIN,
    *,
    limit: int | None = None,
) -> EncodedPrompt:
    """Read a prompt of any form; one that is encoded is returned as it is.

    A text that more than ``limit`` tokens must spell is refused before it is encoded.

    Raises:
        InvalidRequestError: the form is unknown, the prompt is empty, or there is no tokenizer to
            read its text.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, dict):
        return _encode_fields(prompt, tokenizer, options, limit)
    if isinstance(prompt, str):
        return _encode_text(prompt, tokenizer, options, limit)
    return EncodedPrompt(_cut(_read_ids(prompt), options))


def _encode_fields(
    fields: Any, tokenizer: Tokenizer | None, options: EncodeOptions, limit: int | None
) -> EncodedPrompt:
    for name in fields:
        if name not in ("prompt", "prompt_token_ids", "cache_salt"):
            raise InvalidRequestError(
                f"{name} is no field of a prompt: use prompt or prompt_token_ids, and cache_salt",
                parameter=str(name),
            )
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt is {text!r}; it must be a string", parameter="prompt")
    salt = _read_salt(fields.get("cache_salt"))
    if token_ids is not None:
        if text is not None:
            check_unicode("prompt", text)
        return EncodedPrompt(_cut(_read_ids(token_ids), options), text, salt)
    if text is None:
        raise InvalidRequestError("prompt or prompt_token_ids is missing", parameter="prompt")
    return replace(_encode_text(text, tokenizer, options, limit), cache_salt=salt)


def _encode_text(
    text: str, tokenizer: Tokenizer | None, options: EncodeOptions, limit: int | None
) -> EncodedPrompt:
    if tokenizer is None:
        raise InvalidRequestError(
            "the engine runs without a tokenizer: give prompt_token_ids", parameter="prompt"
        )
    if limit is not None and len(text) > limit:
        text = _cut_text(text, tokenizer, options, limit)
    check_unicode("prompt", text)
    ids = tokenizer.encode(text, add_special_tokens=options.add_special_tokens)
    if not ids:
        raise InvalidRequestError(
            "prompt is empty: no BOS is added to it, so there is nothing to continue",
            parameter="prompt",
        )
    token_ids = np.asarray(ids, dtype=np.int32)
    if options.max_tokens is None or len(ids) <= options.max_tokens:
        return EncodedPrompt(token_ids, text)
    num_added = tokenizer.num_added_tokens if options.add_special_tokens else (0, 0)
    return EncodedPrompt(_cut(token_ids, options, num_added=num_added))


def _cut_text(text: str, tokenizer: Tokenizer, options: EncodeOptions, limit: int) -> str:
    """Take away what no kept token can reach into; refuse a text that cannot fit.

    Encoding takes seconds for every ten million characters.
    """
    longest = tokenizer.max_characters_per_token
    if options.max_tokens is None:
        if len(text) > limit * longest:
            raise InvalidRequestError(
                f"the prompt has {len(text)} characters, which are more than {limit} tokens, but a"
                f" request may have {limit} with at least one of them generated",
                parameter="prompt",
                reason_code="prompt_too_long",
            )
        return text
    room = 2 * options.max_tokens * longest  # what is near the cut is not kept
    return text[-room:] if options.truncation_side == "left" else text[:room]


def _cut(
    token_ids: Int32Array, options: EncodeOptions, *, num_added: tuple[int, int] = (0, 0)
) -> Int32Array:
    """Take away what is too much; the first and the last ``num_added`` tokens stay if they can."""
    if options.max_tokens is None or len(token_ids) <= options.max_tokens:
        return token_ids
    front, back = num_added if sum(num_added) < options.max_tokens else (0, 0)
    own = token_ids[front : len(token_ids) - back]
    room = options.max_tokens - front - back
    kept = own[-room:] if options.truncation_side == "left" else own[:room]
    return np.concatenate((token_ids[:front], kept, token_ids[len(token_ids) - back :]))


def _read_ids(token_ids: Any) -> Int32Array:
    name = "prompt_token_ids"
    if not isinstance(token_ids, Sequence | np.ndarray):
        raise InvalidRequestError(
            f"a prompt is a string, a list of token ids or a dict, not {type(token_ids).__name__}",
            parameter="prompt",
        )
    if len(token_ids) == 0:
        raise InvalidRequestError(
            "prompt_token_ids is empty; it must have at least one", parameter=name
        )
    ids = _convert(token_ids)
    if ids.min() < 0 or ids.max() > LARGEST_ID:
        outside = next(int(token_id) for token_id in ids if not 0 <= token_id <= LARGEST_ID)
        raise InvalidRequestError(
            f"prompt_token_ids contains {outside}, which is no token id", parameter=name
        )
    return ids.astype(np.int32, copy=False)


def _convert(token_ids: Any) -> NDArray[np.integer[Any]]:
    """Make an array of a list of integers, in three quarters of numpy's time, or of anything."""
    if isinstance(token_ids, list) and not isinstance(token_ids[0], bool):
        try:
            return np.frombuffer(array("i", token_ids), dtype=np.int32)
        except (TypeError, OverflowError):
            pass  # numpy tells what they are
    try:
        ids = np.array(token_ids)
    except ValueError:  # rows of different lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            "prompt_token_ids must be a flat list of integers", parameter="prompt_token_ids"
        )
    return ids


def _read_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_LENGTH} characters",
            parameter="cache_salt",
        )
    check_unicode("cache_salt", salt)
    return salt
