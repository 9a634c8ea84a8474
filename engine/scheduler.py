"""Core process: decides which requests compute how many tokens in the next step.

A function of its inputs: no clock, no randomness, no environment. docs/scheduler.md explains the
states and works through a step.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import count

from octavo.block_manager.block_table import BlockSpec
from octavo.block_manager.hashing import KeyChain
from octavo.block_manager.manager import BlockManager, Match
from octavo.config import SchedulerConfig
from octavo.engine.admission import AdmissionRules
from octavo.engine.growth import GrowthEstimate, RetractionCause
from octavo.engine.journal import Journal, PlanDecisions, UpdateChanges
from octavo.engine.launched_step import LaunchedStep, UpdatedStep
from octavo.engine.policies import POLICIES
from octavo.engine.request import Request, RequestStatus
from octavo.engine.step_builder import StepBuilder, split_by_gap
from octavo.engine.waiting_queue import WaitingQueue
from octavo.engine.waits import Holdups, WaitKind, WaitReason
from octavo.errors import InvalidRequestError
from octavo.executor.step import EXHAUSTED, Step, StepResult
from octavo.outputs import FinishReason

ADMISSION_WINDOW = 128
"""Waiting requests that one plan looks at; those behind are reached when these have moved."""
POOL_RAN_OUT = WaitReason(WaitKind.BLOCKS, "running requests took all blocks: one was retracted")


class Scheduler:
    """Owns the status and the token counts of every request from ``add`` to its final output.

    Invariants between calls: a request is in exactly one of ``waiting``, ``running`` and
    ``draining`` until it is finished; running requests have a row, a block table and a gap of at
    least one token, and are no more than the tokens of a step; waiting and draining ones have
    neither row nor blocks; promised tokens equal the samples of launched steps.
    """

    def __init__(self, config: SchedulerConfig, journal: Journal | None = None) -> None:
        spec = BlockSpec(config.block_size)
        self.config = config
        self._block_size = config.block_size
        self.block_manager = BlockManager(config.num_blocks, spec)
        self.journal = journal or Journal(config)
        self.policy = POLICIES[config.policy](config, self.block_manager)
        self.growth = GrowthEstimate(spec, config.conservativeness)
        self.waiting = WaitingQueue(self.policy)
        self.holdups = Holdups()
        self.running: dict[int, Request] = {}
        self.draining: dict[int, Request] = {}
        self.requests: dict[int, Request] = {}
        self.rules = AdmissionRules(config, self.block_manager, self.running)
        self.retractions: Counter[RetractionCause] = Counter()
        self.num_failed_rows = 0
        self._finished: list[Request] = []
        self._launched: deque[LaunchedStep] = deque()
        self._newest: LaunchedStep | None = None
        """The last step that was planned, whether or not its result has been applied."""
        self._exhausted: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._step_ids = count()

    @property
    def num_retractions(self) -> int:
        """Retractions since the start."""
        return self.retractions.total()

    @property
    def has_unfinished_requests(self) -> bool:
        """True while a request is waiting, running or draining."""
        return bool(self.requests)

    @property
    def has_untaken_ends(self) -> bool:
        """True while ``take_finished`` has a request to return."""
        return bool(self._finished)

    @property
    def plan_window(self) -> int | None:
        """How many waiting requests a plan looks at, the first by arrival; None: it may be any."""
        return ADMISSION_WINDOW if self.policy.is_by_arrival else None

    @property
    def oldest_launched(self) -> LaunchedStep:
        """The step whose result is applied next."""
        return self._launched[0]

    def add(self, request: Request, chain: KeyChain) -> None:
        """Put a request into the queue.

        Raises: InvalidRequestError: it could never run to its end, for the reason and with the
        numbers given.
        """
        limit = self.config.max_tokens_per_request
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens", parameter="prompt")
        if request.max_total_tokens > limit:
            raise InvalidRequestError(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens "
                f"{request.message.max_tokens} exceed the limit of {limit} tokens per request",
                parameter="max_tokens",
            )
        assert request.number not in self.requests, f"{request!r} was added before"
        self.requests[request.number] = request
        self.block_manager.register(request.number, chain)
        self.waiting.add(request)
        self.journal.add(request, chain.keys)

    def abort(self, numbers: Iterable[int]) -> None:
        """End requests on the client's wish; unknown and finished ones are ignored."""
        for number in numbers:
            request = self.requests.get(number)
            if request is not None:
                self.journal.abort(number)
                self._finish(request, "abort")

    def expire(self, numbers: Iterable[int], error: str) -> None:
        """End requests whose time is up with ``error``; unknown and finished ones are ignored.

        When that is, the front end decides: it has the clock.
        """
        for number in numbers:
            request = self.requests.get(number)
            if request is not None:
                self.journal.expire(number)
                self._finish(request, "error", error=error)

    def finish(self, number: int, *, stop_reason: str, num_output_tokens: int) -> None:
        """End a request in whose text a stop string was found; drops the tokens beyond it."""
        request = self.requests.get(number)
        if request is not None:
            self.journal.finish(number)
            del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
            self._finish(request, "stop", stop_reason=stop_reason)

    def reset_prefix_cache(self) -> int:
        """Forget the K/V of every block that no running request uses; return how many."""
        self.journal.reset()
        return self.block_manager.pool.drop_cached()

    def take_finished(self) -> list[Request]:
        """Return the requests that ended since the last call, in the order in which they did."""
        finished, self._finished = self._finished, []
        return finished

    def plan(self, now_s: float) -> Step | None:
        """Decide the next step; None when nothing can be computed before a launched step's result
        is known.
        """
        self.block_manager.begin_plan()
        self.holdups = Holdups()
        self._drain()
        decisions = PlanDecisions()
        builder = StepBuilder(self._newest)
        budget, cap = self._continue_running(builder, decisions)
        if decisions.retracted:
            self.growth.learn(self.running.values())
            self.holdups.rest = POOL_RAN_OUT
        else:
            self._admit(builder, decisions, budget=budget, cap=cap, now_s=now_s)
        step = self._build(builder, decisions) if builder.requests else None
        self.journal.plan(decisions)
        return step

    def update(self, result: StepResult) -> UpdatedStep:
        """Apply the result of the oldest launched step."""
        launched = self._launched.popleft()
        assert launched.step.step_id == result.step_id, f"result of {result.step_id} out of order"
        changes = UpdateChanges()
        for index, message in result.row_errors.items():
            request = launched.requests[index]
            if not request.is_finished:
                changes.failed.append(request.number)
                self.num_failed_rows += message != EXHAUSTED
                if request.status is RequestStatus.RUNNING:
                    self.block_manager.distrust(request.number)
                self._finish(request, "error", error=message)
        appended = launched.append_tokens(result.token_ids.tolist(), block_size=self._block_size)
        self._extend_chains(appended.full, changes)
        for request in appended.ended:
            self._end(request, changes)
        scored = launched.list_scored()
        for request in scored:
            self._finish(request, "length")
        self.journal.update(result.step_id, changes)
        return UpdatedStep(launched, tuple(appended.sampled), tuple(scored))

    def fail_step(self, message: str) -> None:
        """End the requests of the step that ``plan`` just returned: it could not be launched.

        The executor has applied the step's rows and blocks and computed nothing.
        """
        launched = self._launched.pop()
        self.journal.fail(launched.step.step_id)
        self.block_manager.withdraw_born()
        for request in launched.requests:
            if not request.is_finished:
                self._finish(request, "error", error=message)

    def check_invariants(self) -> None:
        """Assert what the class docstring states, and the block manager's own invariants."""
        self.block_manager.check_invariants()
        waiting = {request.number: request for request in self.waiting}
        total = len(self.waiting) + len(self.running) + len(self.draining)
        assert total == len(self.requests), f"{total} requests held, {len(self.requests)} known"
        assert {**waiting, **self.running, **self.draining} == self.requests
        promised = [
            request.number
            for launched in self._launched
            for request, sample in zip(launched.requests, launched.step.sample, strict=True)
            if sample
        ]
        for request in self.requests.values():
            assert request.num_promised_tokens == promised.count(request.number), repr(request)
        assert len(self.running) <= self.config.max_num_batched_tokens, "a row may get no token"
        for request in self.running.values():
            self._check_running(request)
        for request in (*waiting.values(), *self.draining.values()):
            assert request.row is None, f"{request!r} holds row {request.row}"
            assert request.num_computed_tokens == 0, repr(request)
        rows = [request.row for request in self.running.values() if request.row is not None]
        assert sorted([*rows, *self._free_rows]) == list(range(self.config.max_num_seqs))

    def _build(self, builder: StepBuilder, decisions: PlanDecisions) -> Step:
        if not decisions.retracted:
            self.growth.decay()
        decisions.step_id = next(self._step_ids)
        self._newest = builder.build(decisions.step_id, tuple(self._released_rows))
        self._released_rows.clear()
        self._launched.append(self._newest)
        return self._newest.step

    def _check_running(self, request: Request) -> None:
        assert request.status is RequestStatus.RUNNING, repr(request)
        block_ids = self.block_manager.block_ids(request.number)
        capacity = len(block_ids) * self.config.block_size
        assert capacity == request.num_allocated_tokens, f"{request!r} has {len(block_ids)} blocks"
        assert request.num_computed_tokens <= capacity, repr(request)
        has_gap = request.num_computed_tokens < request.num_tokens
        assert has_gap or request.is_exhausted, f"{request!r} has no gap"
        assert request.num_tokens <= request.max_total_tokens, repr(request)

    def _drain(self) -> None:
        """Release what requests hold whose last token a launched step will sample."""
        for request in self._exhausted:
            if request.status is RequestStatus.RUNNING:
                self._leave_running(request)
                request.move_to(RequestStatus.DRAINING)
                self.draining[request.number] = request
        self._exhausted.clear()

    def _continue_running(self, builder: StepBuilder, decisions: PlanDecisions) -> tuple[int, int]:
        """Schedule running requests, smallest gap first.

        Returns the budget that is left, and the most tokens of one prompt in this step.
        """
        budget = self.config.max_num_batched_tokens
        decoding, prefilling = split_by_gap(self.running.values())
        cap = self._chunk_cap(is_decoding=bool(decoding))
        decisions.retracted += self._grow_tables(decoding, builder)
        if decisions.retracted:
            decoding = [request for request in decoding if request.row is not None]
            prefilling = [request for request in prefilling if request.row is not None]
        self._decode(decoding, builder)
        budget -= len(decoding)
        for request in prefilling:
            if budget == 0:
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget, cap)
            if num_tokens != 1:
                decisions.chunks.append((request.number, num_tokens))
            self._schedule(builder, request, num_tokens)
            budget -= num_tokens
        return budget, cap

    def _grow_tables(self, decoding: Sequence[Request], builder: StepBuilder) -> list[int]:
        """Give requests one token behind the blocks they lack; returns who was retracted for it.

        That is the last in the policy's order, the request itself at worst, until it fits.
        """
        retracted: list[int] = []
        full = [
            request for request in decoding if request.num_tokens > request.num_allocated_tokens
        ]
        for request in full:
            while request.row is not None and not self._grow_table(request, builder):
                retracted.append(self._retract_last(request, builder))
        return retracted

    def _grow_table(self, request: Request, builder: StepBuilder) -> bool:
        block_ids = self.block_manager.grow(request.number, request.num_tokens)
        if block_ids is None:
            return False
        assert request.row is not None
        request.num_allocated_tokens += len(block_ids) * self._block_size
        builder.add_blocks(request.row, block_ids)
        return True

    def _retract_last(self, request: Request, builder: StepBuilder) -> int:
        """Retract the last in the policy's order for a request that needs blocks."""
        assert len(self.running) > 1, f"{request!r} alone does not fit the pool"
        victim = max(self.running.values(), key=self.policy.order_key)
        is_own = victim is request
        cause = RetractionCause.OWN_GROWTH if is_own else RetractionCause.OTHERS_GROWTH
        self._retract(victim, builder, cause)
        return victim.number

    def _chunk_cap(self, *, is_decoding: bool) -> int:
        threshold = self.config.long_prefill_token_threshold
        return threshold if is_decoding and threshold else self.config.max_num_batched_tokens

    def _retract(self, request: Request, builder: StepBuilder, cause: RetractionCause) -> None:
        assert request.row is not None
        builder.drop_blocks(request.row)
        self._leave_running(request)
        request.move_to(RequestStatus.RETRACTED)
        request.num_retractions += 1
        self.retractions[cause] += 1
        self.waiting.add(request)

    def _admit(
        self,
        builder: StepBuilder,
        decisions: PlanDecisions,
        *,
        budget: int,
        cap: int,
        now_s: float,
    ) -> None:
        """Start waiting requests in the policy's order until one does not fit."""
        if not self.waiting or self._is_full(budget):
            return
        growth = self.growth.num_blocks(self.running.values())
        admitted: list[Request] = []
        for request in self.waiting.ranked(ADMISSION_WINDOW):
            wait = self.rules.find_wait(request)
            if wait is not None:
                self.holdups.hold(request.number, wait)
                continue
            match = self.rules.match(request)
            lack = self.rules.find_lack(request, match, growth)
            if lack is not None:
                self.holdups.stop_at(request.number, lack)
                break  # nobody behind takes the blocks of one that does not fit
            num_tokens = min(request.num_tokens - match.num_tokens, budget, cap)
            self._start(request, match, builder, now_s=now_s)
            self._schedule(builder, request, num_tokens)
            decisions.admitted.append((request.number, match.num_tokens, num_tokens))
            admitted.append(request)
            growth += self.growth.num_blocks([request])
            budget -= num_tokens
            if self._is_full(budget):
                break
        for request in admitted:
            self.waiting.admit(request)

    def _is_full(self, budget: int) -> bool:
        """Say whether no request whatever can start any more; notes why."""
        limit = self.rules.find_limit(num_free_rows=len(self._free_rows), budget=budget)
        if limit is not None:
            self.holdups.rest = limit
        return limit is not None

    def _start(self, request: Request, match: Match, builder: StepBuilder, *, now_s: float) -> None:
        """Give a waiting request its row and the blocks of all its known tokens."""
        self.block_manager.allocate(request.number, match, request.num_known_tokens)
        block_ids = self.block_manager.block_ids(request.number)
        request.move_to(RequestStatus.RUNNING)
        request.row = self._free_rows.pop()
        request.num_matched_tokens = request.num_computed_tokens = match.num_tokens
        request.num_allocated_tokens = len(block_ids) * self.config.block_size
        self.running[request.number] = request
        builder.add_row(request, block_ids)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = match.num_tokens
            self.block_manager.count_lookup(
                request.number,
                match,
                num_tokens=request.num_prompt_tokens,
                not_read=self.rules.reason_not_read(request),
            )

    def _schedule(self, builder: StepBuilder, request: Request, num_tokens: int) -> None:
        """Put a request into the step and key the blocks that the step fills."""
        num_computed = builder.schedule(request, num_tokens)
        if num_computed >= request.num_tokens_to_compute:
            self._exhausted.append(request)
        if num_tokens > 1 or num_computed % self._block_size == 0:
            self._seal(request)

    def _decode(self, requests: Sequence[Request], builder: StepBuilder) -> None:
        """Do as ``_schedule`` does for requests one token behind, of which there may be many."""
        builder.decode(requests)
        block_size = self._block_size
        for request in requests:
            num_computed = request.num_computed_tokens
            if num_computed >= request.num_tokens_to_compute:
                self._exhausted.append(request)
            # Where the last token is not known yet, the update that tells it keys the block.
            if num_computed % block_size == 0 and num_computed == request.num_known_tokens:
                self._seal(request)

    def _seal(self, request: Request) -> None:
        self.block_manager.seal(
            request.number, min(request.num_known_tokens, request.num_computed_tokens)
        )

    def _end(self, request: Request, changes: UpdateChanges) -> None:
        """Finish a request whose newest token is its last."""
        token_id = request.token_ids[-1]
        if token_id in request.ending_ids:
            changes.stopped.append(request.number)
            self._finish(request, "stop", stop_reason=request.stop_reason_of(token_id))
        else:
            self._finish(request, "length")

    def _extend_chains(self, requests: Sequence[Request], changes: UpdateChanges) -> None:
        """Key the blocks that the newest known tokens of requests have filled."""
        for request in requests:
            chain = self.block_manager.chain(request.number)
            chain.extend(request.token_ids)
            changes.keys.append((request.number, chain.keys[-1].hex()))
            if request.status is RequestStatus.RUNNING:
                self._seal(request)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        elif request.status is RequestStatus.DRAINING:
            del self.draining[request.number]
        else:
            self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.finish_error = error
        self.block_manager.forget(request.number)
        del self.requests[request.number]
        self._finished.append(request)

    def _leave_running(self, request: Request) -> None:
        """Release a request's row and blocks: whoever gets them writes later in the same order of
        steps.
        """
        assert request.row is not None
        del self.running[request.number]
        self.block_manager.release(request.number)
        self._released_rows.append(request.row)
        self._free_rows.append(request.row)
        request.row = None
        request.num_spent_before = request.num_spent_tokens
        request.num_matched_tokens = request.num_computed_tokens = 0
        request.num_allocated_tokens = 0
