"""API process: a client's SamplingParams resolved into what the sampler needs to know of a row."""

import hashlib
from collections.abc import Iterable, Sequence

from octavo.engine.messages import CoreInfo
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.executor.step import RowSampling
from octavo.sampling_params import MIN_TEMPERATURE, SamplingParams


def create_row_sampling(
    params: SamplingParams, *, eos_ids: Sequence[int], bad_words_ids: Sequence[tuple[int, ...]]
) -> RowSampling:
    """Resolve every value but the seed, which differs between the answers to one request."""
    held_back = sorted({*eos_ids, *(params.stop_token_ids or [])}) if params.min_tokens else []
    allowed = params.allowed_token_ids
    return RowSampling(
        seed=0,
        temperature=0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE),
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        held_back_ids=tuple(held_back),
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words_ids=tuple(bad_words_ids),
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
    )


def derive_seed(*parts: int) -> int:
    """Mix integers into one of 63 bits; the same in every process and on every machine."""
    text = ",".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def encode_bad_words(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences that spell a word inside a text, also after a space."""
    # Inside a text: many tokenizers put a space before the first word of what they encode.
    anchor = tokenizer.encode("\n", add_special_tokens=False)
    sequences: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in words:
        for form in (word.lstrip(" "), " " + word.lstrip(" ")):
            ids = tokenizer.encode("\n" + form, add_special_tokens=False)
            follows = ids[: len(anchor)] == anchor
            ids = (
                ids[len(anchor) :] if follows else tokenizer.encode(form, add_special_tokens=False)
            )
            if ids:
                sequences[tuple(ids)] = None
    return list(sequences)


def check_vocabulary(params: SamplingParams, info: CoreInfo, eos_ids: Sequence[int]) -> None:
    """Refuse token ids that the model does not have, and a selection that leaves nothing to sample.

    Raises:
        InvalidRequestError: names the parameter and the id.
    """
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token_id in ids:
            if token_id >= info.vocab_size:
                raise InvalidRequestError(
                    f"{name} contains {token_id}; the model's token ids end at"
                    f" {info.vocab_size - 1}",
                    parameter=name,
                )
    for name, count in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if count is not None and count > info.vocab_size:
            raise InvalidRequestError(
                f"{name} is {count}; the model has only {info.vocab_size} tokens", parameter=name
            )
    held_back = {*eos_ids, *(params.stop_token_ids or [])}
    if (
        params.min_tokens
        and params.allowed_token_ids
        and held_back.issuperset(params.allowed_token_ids)
    ):
        raise InvalidRequestError(
            f"allowed_token_ids has only tokens that end the output, but min_tokens is"
            f" {params.min_tokens}",
            parameter="allowed_token_ids",
        )
