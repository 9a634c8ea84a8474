"""The contracts of scheduling as a state machine: any order of arrivals, aborts, finishes, steps.

Six blocks, up to twelve requests at a time, both lags, every policy. At every step the promises of
``liveness`` hold and the fake executor has checked each row's context; every request ends within a
bound computed from its tokens, and what it got is what it gets when it runs alone.
"""

from functools import partial
from itertools import chain

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.engine import waiting_queue
from octavo.engine.messages import (
    AbortRequests,
    ExpireRequests,
    FinishRequest,
    ResetPrefixCache,
    unpack_ids,
)
from octavo.executor.step import RowSampling
from tests.engine.liveness import WatchedRun
from tests.engine.requests import EOS, make_add, make_core
from tests.fake_executor import Faults, every_nth

NUM_BLOCKS = 6
BLOCK_SIZE = 4
LIMIT = NUM_BLOCKS * BLOCK_SIZE
MAX_REQUESTS = 12
FIRST_REFUSED = 1_000_000
"""Number of the first request that can never fit."""
TIME_IS_UP = "its time is up"
WORDS = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]


class CoreMachine(RuleBasedStateMachine):
    """Drives an engine core as clients would."""

    def __init__(self, policy, lag):
        super().__init__()
        self.policy, self.lag = policy, lag

    @initialize(
        budget=st.integers(3, 32),
        conservativeness=st.sampled_from([0.0, 1.0]),
        min_deferral_tokens=st.sampled_from([4, 8, 256]),
        failing_steps=st.sets(st.integers(0, 60), max_size=3),
        threshold=st.sampled_from([None, 2]),
    )
    def start(self, budget, failing_steps, threshold, **fields):
        self.run = make_core(
            policy=self.policy,
            lag=self.lag,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=3,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            executor_options={
                "special_token": every_nth(9, EOS),
                "faults": Faults(submit=failing_steps),
            },
            **fields,
        )
        self.watched = WatchedRun(self.run)
        self.added = {}
        self.num_refused = 0
        self.ended_outside = {}
        self.work_bound = 200

    @rule(
        words=st.lists(st.sampled_from(WORDS), max_size=4),
        tail=st.integers(1, 4),
        max_tokens=st.integers(0, 12),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([None, None, "a"]),
        private=st.booleans(),
        skip=st.booleans(),
        min_tokens=st.integers(0, 3),
    )
    @precondition(lambda self: len(self.run.scheduler.requests) < MAX_REQUESTS)
    def add(self, words, tail, max_tokens, priority, salt, private, skip, min_tokens):
        number = len(self.added)
        prompt = [*chain.from_iterable(words), *range(40, 40 + tail)]
        sampling = RowSampling(
            seed=number,
            temperature=1.0,
            min_tokens=min_tokens,
            held_back_ids=(EOS,),
            num_prompt_logprobs=0 if skip else None,
        )
        message = make_add(
            number,
            prompt,
            max_tokens=min(max_tokens if skip else max(1, max_tokens), LIMIT - len(prompt)),
            sampling=sampling,
            priority=priority if self.policy == "priority" else 0,
            cache_salt=salt,
            private_namespace=number // 3 if private else None,
            skip_reading_prefix_cache=skip,
        )
        self.added[number] = message
        # A request computes at most its tokens once per retraction of it; under the work of all
        # others a retraction needs another request's token, so steps are bounded by their product.
        self.work_bound += 4 * LIMIT * MAX_REQUESTS
        self.run.core.apply([message])

    @rule(data=st.data())
    @precondition(lambda self: self.run.scheduler.requests)
    def end_from_outside(self, data):
        number = data.draw(st.sampled_from(sorted(self.run.scheduler.requests)))
        is_abort = data.draw(st.booleans())
        self.ended_outside[number] = "abort" if is_abort else "error"
        message = AbortRequests((number,)) if is_abort else ExpireRequests((number,), TIME_IS_UP)
        self.watched.end(number, message)

    @rule(num_tokens=st.integers(1, 2 * LIMIT), excess=st.integers(1, 5))
    def add_what_can_never_fit(self, num_tokens, excess):
        self.num_refused += 1
        max_tokens = max(1, LIMIT - num_tokens + excess)
        number = FIRST_REFUSED + self.num_refused
        self.watched.refuse(make_add(number, [9] * num_tokens, max_tokens=max_tokens))

    @rule(data=st.data())
    @precondition(
        lambda self: any(r.num_output_tokens for r in self.run.scheduler.requests.values())
    )
    def find_stop_string(self, data):
        candidates = [r for r in self.run.scheduler.requests.values() if r.num_output_tokens]
        request = data.draw(st.sampled_from(sorted(candidates, key=lambda r: r.number)))
        num_kept = data.draw(st.integers(0, request.num_output_tokens))
        self.ended_outside[request.number] = "stop"
        self.watched.end(request.number, FinishRequest(request.number, "x", num_kept))

    @rule()
    def reset_prefix_cache(self):
        self.run.core.apply([ResetPrefixCache()])

    @rule(is_paused=st.sampled_from([True, False, False]))
    def pause(self, is_paused):
        self.watched.pause(is_paused)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.run.core.has_work:
                self.watched.step()
        assert self.run.num_steps < self.work_bound

    @invariant()
    def finished_requests_got_what_they_get_alone(self):
        for number, final in list(self.run.finished.items()):
            if number < FIRST_REFUSED:
                self.check_final(number, final)
            del self.run.finished[number]
            self.run.tokens.pop(number, None)

    def check_final(self, number, final):
        message = self.added[number]
        got = self.run.tokens.get(number, [])
        if final.reason == "error" and final.error != TIME_IS_UP:
            assert "could not be launched" in final.error
            return
        if number in self.ended_outside:
            assert final.reason == self.ended_outside[number]
        else:
            assert final.reason in ("stop", "length")
        prompt = unpack_ids(message.prompt).tolist()
        alone = self.run.executor.expected_tokens(prompt, message.max_tokens, message.sampling)
        assert got == alone[: len(got)]
        if final.reason == "length":
            assert len(got) == message.max_tokens
            assert EOS not in got
        if final.reason == "stop" and number not in self.ended_outside:
            assert got[-1] == EOS
            assert EOS not in got[:-1]

    def teardown(self):
        if not hasattr(self, "run"):
            return
        self.watched.pause(False)
        while self.run.core.has_work:
            self.watched.step()
            assert self.run.num_steps < self.work_bound, "a request does not end"
        self.finished_requests_got_what_they_get_alone()
        pool = self.run.scheduler.block_manager.pool
        assert pool.num_used == 0
        assert len(self.run.executor.rows) <= 3


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "dfs"])
@pytest.mark.parametrize("lag", [0, 1])
def test_no_order_of_events_breaks_a_promise(policy, lag, monkeypatch):
    monkeypatch.setattr(waiting_queue, "MAX_PASSED", 2)  # so that few requests reach it
    run_state_machine_as_test(
        partial(CoreMachine, policy, lag),
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
