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
    """One client request: its prompt, its ``n`` answers and its times."""

    def __init__(self, submission: Submission, answers: Sequence["Answer"]) -> None:
        self.request_id = submission.request_id
        self.prompt_logprobs = _start_prompt_logprobs(submission)
        self.metrics = RequestMetrics(submission.arrival_s)
        self._kind = submission.params.output_kind
        self.is_streamed = self._kind is not RequestOutputKind.FINAL_ONLY
        self._answers = answers
        self._num_unfinished = len(answers)
        self._prompt_text = submission.prompt.text
        self._prompt_ids = submission.prompt.token_ids
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
            request_id=self.request_id,
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
    def finished(self) -> bool:
        """True when every answer has ended."""
        return self._num_unfinished == 0

    @property
    def has_news(self) -> bool:
        """True when the client is owed an output; with FINAL_ONLY that is the last one alone."""
        if not self.is_streamed:
            return self.finished
        return any(answer.has_news for answer in self._answers)

    def note_started(self, answer: "Answer", started: StartedRequest) -> None:
        """Record that an answer was admitted; the first one's cache hits are the request's."""
        if answer.index == 0:
            self._num_cached_tokens = started.num_cached_tokens
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = started.scheduled_s

    def note_token(self, now_s: float) -> None:
        """Record the time of a token."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now_s
        self.metrics.last_token_time = now_s

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
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.take_new() if is_delta else answer.take_whole() for answer in answers],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
        )
        if is_delta:
            self.prompt_logprobs = None
        return output


def _start_prompt_logprobs(submission: Submission) -> list[TokenLogprobs | None] | None:
    """A prompt of one token has nothing to report, but the list that was asked for all the same."""
    is_asked = submission.params.prompt_logprobs is not None
    return [None] if is_asked and len(submission.prompt.token_ids) == 1 else None


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
        self.has_news = False
        self._detokenizer = detokenizer
        self._includes_stop = params.include_stop_str_in_output
        self._token_ids: list[int] = []
        self._num_taken = 0
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._finish: Finish | None = None

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self._finish is not None

    @property
    def num_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self._token_ids)

    def append(self, token_id: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed.

        A stop token is one of the answer's tokens, but part of its text only on request.
        """
        self._token_ids.append(token_id)
        self.has_news = True
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
        self.has_news = True
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
        self.has_news = False
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
