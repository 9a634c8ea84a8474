"""API process: the forms in which a prompt may be given, read into token ids.

Does not know the engine's limits; ``request_tracker`` checks those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.executor.step import Int32Array

MAX_CACHE_SALT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it. ``text`` is None when the caller gave token ids alone."""

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


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> EncodedPrompt:
    """Read a prompt of any form; text gets the tokenizer's special tokens, such as BOS.

    Raises:
        InvalidRequestError: the form is unknown, the prompt is empty, or there is no tokenizer to
            read its text.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, dict):
        return _encode_fields(prompt, tokenizer)
    if isinstance(prompt, str):
        return EncodedPrompt(_encode_text(prompt, tokenizer), prompt)
    return EncodedPrompt(_read_ids(prompt))


def _encode_fields(fields: Any, tokenizer: Tokenizer | None) -> EncodedPrompt:
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
        return EncodedPrompt(_read_ids(token_ids), text, salt)
    if text is None:
        raise InvalidRequestError("prompt or prompt_token_ids is missing", parameter="prompt")
    return EncodedPrompt(_encode_text(text, tokenizer), text, salt)


def _encode_text(text: str, tokenizer: Tokenizer | None) -> Int32Array:
    if tokenizer is None:
        raise InvalidRequestError(
            "the engine runs without a tokenizer: give prompt_token_ids", parameter="prompt"
        )
    ids = tokenizer.encode(text)
    if not ids:
        raise InvalidRequestError(
            "prompt is empty: this tokenizer adds no BOS, so there is nothing to continue",
            parameter="prompt",
        )
    return np.asarray(ids, dtype=np.int32)


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
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # rows of different lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            "prompt_token_ids must be a flat list of integers", parameter=name
        )
    limit = np.iinfo(np.int32).max
    if ids.min() < 0 or ids.max() > limit:
        outside = next(int(token_id) for token_id in ids if not 0 <= token_id <= limit)
        raise InvalidRequestError(
            f"prompt_token_ids contains {outside}, which is no token id", parameter=name
        )
    return ids.astype(np.int32)


def _read_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_LENGTH} characters",
            parameter="cache_salt",
        )
    return salt
