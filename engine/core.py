"""Core process: plans a step, launches it, and applies the result of the one before.

Owns no request and no tensor; it moves messages, Steps and results between their owners.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from octavo.block_manager.hashing import KeyChain, RecentChains, root_key
from octavo.block_manager.manager import MissReason
from octavo.config import SchedulerConfig
from octavo.engine.core_outputs import OutputColumns, PromptLogprobs, pack_logprobs
from octavo.engine.growth import RetractionCause
from octavo.engine.journal import Journal
from octavo.engine.launched_step import UpdatedStep
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreStats,
    Done,
    ExpireRequests,
    ExplainRequest,
    Explanation,
    FinishedRequest,
    FinishRequest,
    PauseScheduling,
    ResetPrefixCache,
    ResumeScheduling,
    StartedRequest,
    pack_ids,
)
from octavo.engine.request import Request
from octavo.engine.request_log import RequestLog
from octavo.engine.scheduler import Scheduler
from octavo.engine.waits import PAUSED, Holdups
from octavo.errors import InvalidRequestError
from octavo.executor.step import Executor, StepHandle, StepResult
from octavo.shown_settings import SettingValue

logger = logging.getLogger(__name__)

MAX_FAILED_LAUNCHES = 8
"""In a row; a device that launches nothing any more is dead."""


class EngineCore:
    """Drives one executor.

    With ``lag`` 1 a step is launched before the result of the one before it is read, so that the
    device never waits for the host; with 0 every result is read first. While it is paused no plan
    is made and launched steps run out; the scheduler never hears of it, so the journal neither.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        lag: int,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: Mapping[str, SettingValue] = MappingProxyType({}),
    ) -> None:
        """Create a core; ``settings`` are told to whoever asks for them."""
        self.scheduler = Scheduler(config, journal)
        self.info = _describe(executor, self.scheduler, settings)
        self._executor = executor
        self._lag = lag
        self._clock = clock
        self._launched: deque[StepHandle] = deque()
        self._recent_chains = RecentChains()
        self._prompt_logprobs = PromptLogprobs()
        self._refused: list[FinishedRequest] = []
        self._questions: list[ExplainRequest] = []
        self._done: list[Done] = []
        self._is_paused = False
        self._is_changed = False
        """By messages in a pause, or of one: no step will tell what has changed."""
        self._while_paused = Holdups(PAUSED)
        self._log = RequestLog(self.scheduler)
        self._num_failed_launches = 0

    @property
    def has_work(self) -> bool:
        """True while there is something to plan, a result to wait for or an end to report."""
        scheduler = self.scheduler
        can_plan = scheduler.has_unfinished_requests and not self._is_paused
        has_report = scheduler.has_untaken_ends or self._refused or self._questions or self._done
        return bool(can_plan or self._launched or has_report or self._is_changed)

    def apply(self, messages: Sequence[CoreMessage]) -> None:
        """Take in what the front end sent, in order."""
        was_paused = self._is_paused
        for message in messages:
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    self.scheduler.abort(message.numbers)
                case ExpireRequests():
                    self.scheduler.expire(message.numbers, message.error)
                case FinishRequest():
                    self.scheduler.finish(
                        message.number,
                        stop_reason=message.stop_reason,
                        num_output_tokens=message.num_output_tokens,
                    )
                case ResetPrefixCache():
                    self._answer(message.ticket, self.scheduler.reset_prefix_cache())
                case PauseScheduling() | ResumeScheduling():
                    self._is_paused = isinstance(message, PauseScheduling)
                    self._answer(message.ticket)
                case ExplainRequest():
                    self._questions.append(message)
        if messages and (was_paused or self._is_paused):
            self._is_changed = True

    def step(self) -> CoreOutputs | None:
        """Plan and launch one step and read at most one result; None when there is nothing to
        report.

        Raises whatever reading a result raises: the engine is dead then.
        """
        now_s = self._clock()
        outputs = OutputColumns(is_due=self._is_changed)
        self._is_changed = False
        is_planned = not self._is_paused and self._launch(now_s, outputs)
        if self._launched and (not is_planned or len(self._launched) > self._lag):
            self._read_result(outputs)
        elif not is_planned and not self._is_paused:
            assert not self.scheduler.has_unfinished_requests, self._describe_stall()
        outputs.finished += self._refused
        self._refused = []
        outputs.finished += [self._final(request) for request in self.scheduler.take_finished()]
        outputs.explanations = [
            Explanation(question.ticket, self._log.explain(question.request_id, self._holdups))
            for question in self._questions
        ]
        outputs.done = self._done
        self._questions, self._done = [], []
        return outputs.pack(self._clock(), self._stats(outputs)) if outputs else None

    def prepare(self) -> bool:
        """Let the executor use a time without work; False when it has nothing left to prepare."""
        return self._executor.prepare()

    def shutdown(self) -> None:
        """Stop the executor and close the journal."""
        self._executor.shutdown()
        self.scheduler.journal.close()

    def _add(self, message: AddRequest) -> None:
        root = root_key(self._executor.info.cache_namespace, private=message.private_namespace)
        request = Request(message)
        chain = KeyChain(root, self.info.block_size, cache_salt=message.cache_salt)
        self._recent_chains.extend(chain, request.token_ids)
        try:
            self.scheduler.add(request, chain)
        except InvalidRequestError as refusal:
            self._refused.append(FinishedRequest(message.number, "error", error=refusal.message))

    def _answer(self, ticket: int | None, num_blocks_dropped: int = 0) -> None:
        if ticket is not None:
            self._done.append(Done(ticket, num_blocks_dropped))

    @property
    def _holdups(self) -> Holdups:
        """Why requests wait now."""
        return self._while_paused if self._is_paused else self.scheduler.holdups

    def _launch(self, now_s: float, outputs: OutputColumns) -> bool:
        """Plan and launch; returns whether a step was planned."""
        step = self.scheduler.plan(now_s)
        planned_s = self._clock()
        outputs.times["plan"] = planned_s - now_s
        if step is None:
            return False
        try:
            handle = self._executor.submit(step)
        except AssertionError:
            raise  # a broken invariant: nothing that follows could be trusted
        except Exception as failure:  # the border to the device: what was in the step ends, named
            self._num_failed_launches += 1
            if self._num_failed_launches > MAX_FAILED_LAUNCHES:
                raise
            logger.exception("step %d could not be launched: %s", step.step_id, step)
            self.scheduler.fail_step(f"the step could not be launched: {failure}")
            return True
        self._num_failed_launches = 0
        self._launched.append(handle)
        outputs.times["launch"] = self._clock() - planned_s
        outputs.num_tokens_scheduled = int(step.num_tokens.sum())
        for new_row in step.new_rows:
            request = self.scheduler.requests[new_row.number]
            if request.num_retractions == 0:
                self._log.note_start(request)
                started = StartedRequest(request.number, now_s, request.num_cached_tokens)
                outputs.started.append(started)
        return True

    def _read_result(self, outputs: OutputColumns) -> None:
        """Wait for the oldest launched step and apply what it produced."""
        started_s = self._clock()
        result = self._launched.popleft().result()
        arrived_s = self._clock()
        updated = self.scheduler.update(result)
        self._collect(result, updated, outputs)
        outputs.times["wait"] = arrived_s - started_s
        outputs.times["update"] = self._clock() - arrived_s

    def _collect(self, result: StepResult, updated: UpdatedStep, outputs: OutputColumns) -> None:
        outputs.numbers = [request.number for request in updated.sampled if request is not None]
        token_ids = result.token_ids
        if len(outputs.numbers) < len(token_ids):
            token_ids = token_ids[[request is not None for request in updated.sampled]]
        outputs.token_ids = pack_ids(token_ids)
        self._log.note_first_tokens(self._clock())
        for index, entry in result.logprobs.items():
            if (request := updated.sampled[index]) is not None:
                outputs.logprobs[request.number] = pack_logprobs(entry)
        outputs.prompt_logprobs = self._prompt_logprobs.collect(result, updated)

    def _final(self, request: Request) -> FinishedRequest:
        assert request.finish_reason is not None
        self._prompt_logprobs.forget(request)
        self._log.note_end(request, self._clock())
        return FinishedRequest(
            request.number,
            request.finish_reason,
            request.stop_reason,
            request.finish_error,
            request.num_retractions,
        )

    def _stats(self, outputs: OutputColumns) -> CoreStats:
        pool = self.scheduler.block_manager.pool
        prefix = self.scheduler.block_manager.stats
        waiting, holdups = self.scheduler.waiting, self._holdups
        oldest = next(iter(waiting), None)
        return CoreStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(waiting),
            num_waiting_by_reason=holdups.count(len(waiting), self.scheduler.requests),
            oldest_waiting=oldest.number if oldest else None,
            oldest_waiting_reason=holdups.reason(oldest.number).text if oldest else None,
            num_blocks_used=pool.num_used,
            num_blocks=pool.num_blocks,
            num_tokens_scheduled=outputs.num_tokens_scheduled,
            num_retractions=_by_name(self.scheduler.retractions),
            num_failed_rows=self.scheduler.num_failed_rows,
            prefix_queries=prefix.num_queries,
            prefix_hits=prefix.num_hits,
            prefix_misses=_by_name(prefix.num_misses),
            is_paused=self._is_paused,
        )

    def _describe_stall(self) -> str:
        scheduler = self.scheduler
        first = next(iter(scheduler.waiting), None)
        reason = first and f", first {first!r}: {scheduler.holdups.reason(first.number).text}"
        return (
            f"nothing can be planned and nothing is awaited: {len(scheduler.running)} running, "
            f"{len(scheduler.waiting)} waiting{reason}"
        )


def _by_name(counts: Mapping[MissReason, int] | Mapping[RetractionCause, int]) -> dict[str, int]:
    return {key.value: count for key, count in counts.items()}


def _describe(
    executor: Executor, scheduler: Scheduler, settings: Mapping[str, SettingValue]
) -> CoreInfo:
    config = scheduler.config
    return CoreInfo(
        max_tokens_per_request=config.max_tokens_per_request,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=executor.info.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        scheduling_policy=config.policy,
        plan_window=scheduler.plan_window,
        settings=dict(settings),
    )
