"""Core process: what one step has to report to the front end, until it is packed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.launched_step import UpdatedStep
from octavo.engine.messages import (
    CoreOutputs,
    CoreStats,
    Done,
    Explanation,
    FinishedRequest,
    LogprobEntry,
    StartedRequest,
    StepTimes,
    pack_ids,
)
from octavo.engine.request import Request
from octavo.executor.step import PositionLogprobs, StepResult


@dataclass(slots=True)
class OutputColumns:
    """What one call of ``step`` has to report, before packing."""

    is_due: bool = False
    """True when the statistics have changed and nothing else has."""
    numbers: list[int] = field(default_factory=list)
    token_ids: bytes = b""
    logprobs: dict[int, LogprobEntry] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[LogprobEntry]] = field(default_factory=dict)
    started: list[StartedRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    num_tokens_scheduled: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        has_answers = self.explanations or self.done
        has_news = self.numbers or self.started or self.finished or has_answers
        return bool(has_news or self.num_tokens_scheduled or self.is_due)

    def pack(self, now_s: float, stats: CoreStats) -> CoreOutputs:
        """Make the message."""
        return CoreOutputs(
            numbers=self.numbers,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            started=self.started,
            finished=self.finished,
            explanations=self.explanations,
            done=self.done,
            now_s=now_s,
            times=StepTimes(**self.times),
            stats=stats,
        )


class PromptLogprobs:
    """Collects the log-probabilities of prompts whose chunks take several steps, by position.

    A prompt's are handed out once: with its first token, or at its end if it gets none.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[LogprobEntry]] = {}
        self._sent: set[int] = set()

    def collect(self, result: StepResult, updated: UpdatedStep) -> dict[int, list[LogprobEntry]]:
        """Keep what a step has found; return by number what is complete."""
        if not result.prompt_logprobs and not self._entries:
            return {}
        ready = [request for request in (*updated.sampled, *updated.scored) if request is not None]
        for index, entries in result.prompt_logprobs.items():
            request = updated.launched.requests[index]
            # Ended before: nobody asks any more. Ended by this very step: the last chance.
            if not request.is_finished or any(request is one for one in ready):
                self._store(request, int(updated.launched.step.num_computed_tokens[index]), entries)
        complete = {request.number: self._take(request) for request in ready}
        return {number: entries for number, entries in complete.items() if entries}

    def forget(self, request: Request) -> None:
        """Drop what is kept for a finished request."""
        self._entries.pop(request.number, None)
        self._sent.discard(request.number)

    def _store(self, request: Request, start: int, entries: Sequence[PositionLogprobs]) -> None:
        """Keep a chunk's entries; a retracted request may compute its prompt, or parts, again."""
        if request.number in self._sent:
            return
        collected = self._entries.setdefault(request.number, [])
        collected[start : start + len(entries)] = [pack_logprobs(entry) for entry in entries]

    def _take(self, request: Request) -> list[LogprobEntry]:
        entries = self._entries.pop(request.number, [])
        if entries:
            self._sent.add(request.number)
        return entries


def pack_logprobs(entry: PositionLogprobs) -> LogprobEntry:
    """Pack one position's for the message."""
    logprobs = entry.logprobs.astype("<f4").tobytes()
    return LogprobEntry(pack_ids(entry.ids), logprobs, entry.rank)
