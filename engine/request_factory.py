"""API process: checks a request against the engine's limits and writes its messages to the core."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.engine.messages import AddRequest, CoreInfo, pack_ids
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.row_sampling import (
    check_vocabulary,
    create_row_sampling,
    derive_seed,
)
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.executor.step import RowSampling
from octavo.sampling_params import SamplingParams

PRIORITY_LIMIT = 2**31  # a priority is an int32


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDefaults:
    """What holds for every request of an engine."""

    eos_ids: tuple[int, ...] = ()
    """Every token that ends an output of this model."""
    seed: int = 0
    """A request without a seed gets one from this and its number, so that a run can be repeated."""
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A client's request as it arrives: one prompt or several, with the same parameters."""

    request_id: str
    keys: Sequence[str]
    """One for each prompt, by which it is told apart from all that is open."""
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    bad_words_ids: Sequence[tuple[int, ...]] = ()
    """The token sequences that ``params.bad_words`` are."""


class RequestFactory:
    """Numbers requests. A refused one takes no number, so it changes nothing for those after it."""

    def __init__(
        self, tokenizer: Tokenizer | None, info: CoreInfo, defaults: RequestDefaults
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._defaults = defaults
        self._numbers = itertools.count()

    def create(self, submission: Submission) -> list[list[AddRequest]]:
        """Return for each prompt one message for each of the ``n`` answers.

        The answers differ in number and seed, and ``prompt_logprobs`` are asked of the first alone.

        Raises:
            InvalidRequestError: a value is impossible, or impossible for this engine; then nothing
                was numbered.
        """
        params = submission.params
        self._check(submission)
        sampling = create_row_sampling(
            params,
            eos_ids=self._defaults.eos_ids,
            bad_words_ids=submission.bad_words_ids,
        )
        return [self._create_answers(submission, prompt, sampling) for prompt in submission.prompts]

    def _create_answers(
        self, submission: Submission, prompt: EncodedPrompt, sampling: RowSampling
    ) -> list[AddRequest]:
        params = submission.params
        base = self._create_first(submission, prompt, sampling)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._defaults.seed, base.number)
        messages = []
        for index in range(params.n):
            sampling = msgspec.structs.replace(base.sampling, seed=derive_seed(seed, index))
            if index:
                base = msgspec.structs.replace(
                    base,
                    number=next(self._numbers),
                    skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
                )
                sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
            messages.append(msgspec.structs.replace(base, sampling=sampling))
        return messages

    def _create_first(
        self, submission: Submission, prompt: EncodedPrompt, sampling: RowSampling
    ) -> AddRequest:
        params = submission.params
        room = self._info.max_tokens_per_request - len(prompt.token_ids)
        number = next(self._numbers)
        return AddRequest(
            number=number,
            request_id=submission.request_id,
            prompt=pack_ids(prompt.token_ids),
            sampling=sampling,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            arrival_s=submission.arrival_s,
            priority=submission.priority,
            eos_ids=() if params.ignore_eos else self._defaults.eos_ids,
            stop_ids=tuple(sorted(set(params.stop_token_ids or ()))),
            cache_salt=prompt.cache_salt,
            private_namespace=None if self._defaults.enable_prefix_caching else number,
            skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache)
            or params.prompt_logprobs is not None,
        )

    def _check(self, submission: Submission) -> None:
        params = submission.params
        params.validate()
        for place, prompt in enumerate(submission.prompts):
            name = "the prompt" if len(submission.prompts) == 1 else f"prompt {place}"
            _check_prompt(prompt, self._info, name=name, is_scored=params.max_tokens == 0)
        check_vocabulary(params, self._info, self._defaults.eos_ids)
        _check_priority(submission.priority, self._info.scheduling_policy)
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(
                "stop needs a tokenizer, and the engine runs without one: use stop_token_ids",
                parameter="stop",
            )


def _check_prompt(prompt: EncodedPrompt, info: CoreInfo, *, name: str, is_scored: bool) -> None:
    limit, length = info.max_tokens_per_request, len(prompt.token_ids)
    if length + (not is_scored) > limit:
        generated = "" if is_scored else " with at least one of them generated"
        raise InvalidRequestError(
            f"{name} has {length} tokens, but a request may have {limit}{generated}: shorten"
            f" the prompt{_name_limit(info)}",
            parameter="prompt",
            reason_code="prompt_too_long",
        )
    largest = int(prompt.token_ids.max())
    if largest >= info.vocab_size:
        raise InvalidRequestError(
            f"{name} contains token id {largest}; the model's token ids end at"
            f" {info.vocab_size - 1}",
            parameter="prompt",
        )


def _check_priority(priority: object, policy: str) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequestError(
            f"priority is {priority!r}; it must be an integer", parameter="priority"
        )
    if priority and policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}; it must be 0 under the {policy} policy:"
            " start the engine with scheduling_policy=priority",
            parameter="priority",
        )
    if not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
        raise InvalidRequestError(
            f"priority is {priority}; it must be from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT - 1}",
            parameter="priority",
        )


def _name_limit(info: CoreInfo) -> str:
    """Say which setting makes the limit."""
    if info.max_tokens_per_request < info.max_model_len:
        return (
            f", or give the KV pool more than {info.num_blocks} blocks of {info.block_size} tokens"
        )
    return f" (max_model_len is {info.max_model_len})"
