"""API process: a request between its admission and its final output, and the answers in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from octavo.engine.detokenizer import Detokenizer
from octavo.engine.messages import LogprobEntry, StartedRequest, unpack_ids
from octavo.engine.request_factory import Submission
from octavo.engine.tokenizer import Tokenizer
from octavo.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams


class OpenRequest:
    """One prompt of a client's request: its ``n`` answers and their times.

    The log-probabilities of the prompt are read when an output shows them, which may be a second's
    work: ``read_prompt_logprobs`` does it before, in any thread.
    """

    def __init__(
        self,
        submission: Submission,
        place: int,
        answers: Sequence["Answer"],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = submission.keys[place]
        self._submission_id = submission.request_id
        prompt = submission.prompts[place]
        self._scores = PromptScores(
            is_asked=submission.params.prompt_logprobs is not None,
            num_tokens=len(prompt.token_ids),
            tokenizer=tokenizer,
        )
        self.metrics = RequestMetrics(submission.arrival_s)
        self._kind = submission.params.output_kind
        self.is_streamed = self._kind is not RequestOutputKind.FINAL_ONLY
        self._answers = answers
        self._num_unfinished = len(answers)
        self._prompt_text = prompt.text
        self._prompt_ids = prompt.token_ids
        self._num_cached_tokens = 0

    @cached_property
    def _prompt_token_ids(self) -> list[int]:
        token_ids: list[int] = self._prompt_ids.tolist()  # not before an output shows them
        return token_ids

    @property
    def unfinished_answers(self) -> list["Answer"]:
        """The answers that are still growing."""
        return [answer for answer in self._answers if not answer.finished]

    def describe(self, now_s: float) -> "InFlight":
        """Return what may be told of the request to others than its client."""
        return InFlight(
            request_id=self._submission_id,
            is_started=self.metrics.first_scheduled_time is not None,
            age_s=now_s - self.metrics.arrival_time,
            num_answers=len(self._answers),
            num_prompt_tokens=len(self._prompt_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=sum(answer.num_tokens for answer in self._answers),
        )

    @property
    def progress(self) -> str:
        """How far the request has come, in words."""
        if self.metrics.first_scheduled_time is None:
            return f"waiting for its first step, with {len(self._prompt_token_ids)} prompt tokens"
        num_tokens = sum(answer.num_tokens for answer in self._answers)
        return f"running, with {num_tokens} tokens generated"

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why the answers that have ended did so, in the order of the answers."""
        reasons = (answer.finish_reason for answer in self._answers)
        return [reason for reason in reasons if reason is not None]

    @property
    def finished(self) -> bool:
        """True when every answer has ended."""
        return self._num_unfinished == 0

    @property
    def has_news(self) -> bool:
        """True when the client is owed an output; with FINAL_ONLY that is the last one alone.

        Whoever asked for the log-probabilities of the prompt gets them with the first output.
        """
        if not self.is_streamed or (self._scores.are_awaited and not self._answers[0].finished):
            return self.finished
        return any(answer.has_news for answer in self._answers)

    @property
    def num_unread_logprobs(self) -> int:
        """How many log-probabilities of the prompt the next output has to read."""
        return self._scores.num_unread

    def note_started(self, answer: "Answer", started: StartedRequest) -> None:
        """Record that an answer was admitted; the first one's cache hits are the request's."""
        if answer.index == 0:
            self._num_cached_tokens = started.num_cached_tokens
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = started.scheduled_s

    def store_prompt_logprobs(self, entries: Sequence[LogprobEntry]) -> None:
        """Take the log-probabilities of the prompt from its second token on."""
        self._scores.store(entries)

    def read_prompt_logprobs(self) -> None:
        """Read them now."""
        self._scores.read()

    def finish(self, answer: "Answer", finish: "Finish") -> None:
        """End one of the answers."""
        answer.finish(finish)
        self._num_unfinished -= 1

    def take_output(self) -> RequestOutput:
        """Return what the client is owed, in the form that it asked for.

        DELTA carries the answers that have news and only what is new in them; the other kinds carry
        all answers whole.
        """
        is_delta = self._kind is RequestOutputKind.DELTA
        answers = [answer for answer in self._answers if answer.has_news or not is_delta]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.take_new() if is_delta else answer.take_whole() for answer in answers],
            finished=self.finished,
            prompt_logprobs=self._scores.take() if is_delta else self._scores.read(),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
        )


class PromptScores:
    """The log-probabilities of one prompt, packed as they came until somebody reads them."""

    def __init__(self, *, is_asked: bool, num_tokens: int, tokenizer: Tokenizer | None) -> None:
        self.are_awaited = is_asked and num_tokens > 1
        """True from the start until they have come."""
        self._tokenizer = tokenizer
        self._packed: Sequence[LogprobEntry] = ()
        # A prompt of one token has nothing to report, but the list that was asked for all the same.
        self._read: list[TokenLogprobs | None] | None = [None] if is_asked else None

    @property
    def num_unread(self) -> int:
        """How many have come and were not read."""
        return sum(len(entry.ids) // 4 for entry in self._packed)

    def store(self, entries: Sequence[LogprobEntry]) -> None:
        """Take those of every token but the first."""
        self._packed = entries
        self.are_awaited = False

    def read(self) -> list[TokenLogprobs | None] | None:
        """Return one entry for each token; None when they were not asked for or have not come."""
        if self._packed:
            entries = [read_logprobs(entry, self._tokenizer) for entry in self._packed]
            self._read, self._packed = [None, *entries], ()
        return None if self.are_awaited else self._read

    def take(self) -> list[TokenLogprobs | None] | None:
        """Do as ``read`` does, the first time that there is something to return."""
        found = self.read()
        if found is not None:
            self._read = None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """An open request in numbers; nothing of its text."""

    request_id: str
    is_started: bool
    """A step has computed something of it; it may have been retracted since."""
    age_s: float
    num_answers: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop string or stop token id that was met; None for the model's own end token."""
    error: str | None = None
    reason_code: str | None = None


class Answer:
    """One of the ``n`` answers while it grows; its token ids and its text only get longer."""

    def __init__(
        self, number: int, index: int, params: SamplingParams, detokenizer: Detokenizer | None
    ) -> None:
        self.number = number
        self.index = index
        self._detokenizer = detokenizer
        self._includes_stop = params.include_stop_str_in_output
        self._interval = params.stream_interval or 1
        self._token_ids: list[int] = []
        self._num_taken = 0
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._finish: Finish | None = None
        self._owes_end = False

    @property
    def has_news(self) -> bool:
        """True when enough has come since the last output, or the end."""
        num_new = len(self._token_ids) - self._num_taken
        return self._owes_end or num_new >= (self._interval if self._num_taken else 1)

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self._finish is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why no more tokens will come; None while they may."""
        return None if self._finish is None else self._finish.reason

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self._token_ids)

    def append(self, token_id: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed.

        A stop token is one of the answer's tokens, but part of its text only on request.
        """
        self._token_ids.append(token_id)
        if self._detokenizer is None or (is_stop_token and not self._includes_stop):
            return None
        return self._detokenizer.append(token_id)

    def append_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Take the log-probabilities of the last token, whose own entry comes first."""
        assert self._logprobs is not None, f"request {self.number} did not ask for logprobs"
        self._logprobs.append(logprobs)
        self._cumulative_logprob += next(iter(logprobs.values())).logprob

    def finish(self, finish: Finish) -> None:
        """End the answer and release the text that was held back."""
        self._finish = finish
        self._owes_end = True
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def take_whole(self) -> CompletionOutput:
        """Return the answer as it is."""
        self._text += self._take_text()
        return self._create_output(self._text, start=0)

    def take_new(self) -> CompletionOutput:
        """Return what has come since the last call."""
        return self._create_output(self._take_text(), start=self._num_taken)

    def _take_text(self) -> str:
        return "" if self._detokenizer is None else self._detokenizer.take()

    def _create_output(self, text: str, *, start: int) -> CompletionOutput:
        self._owes_end = False
        self._num_taken = len(self._token_ids)
        finish = self._finish
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._token_ids[start:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            error=None if finish is None else finish.error,
            reason_code=None if finish is None else finish.reason_code,
        )


def read_logprobs(entry: LogprobEntry, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """Decode one position: the token that is there, then the most likely ones in order."""
    ids = unpack_ids(entry.ids).tolist()
    values = np.frombuffer(entry.logprobs, dtype="<f4").tolist()
    ranks = [entry.rank, *range(1, len(ids))]
    logprobs: TokenLogprobs = {}
    for token_id, value, rank in zip(ids, values, ranks, strict=True):
        if token_id not in logprobs:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            logprobs[token_id] = Logprob(value, rank, text)
    return logprobs
