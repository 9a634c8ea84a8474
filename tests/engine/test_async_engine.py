"""Streams over a core that echoes prompts, in one process and on one event loop."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from prometheus_client import generate_latest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.core import EngineCore
from octavo.engine.door import QueueCaps
from octavo.engine.limits import NO_LIMITS, ServingLimits
from octavo.engine.messages import (
    AddRequest,
    CoreOutputs,
    ExplainRequest,
    Explanation,
    FinishRequest,
)
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request_factory import RequestDefaults
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.checkpoints import build_tokenizer
from tests.echo_core import ECHO_INFO, EchoCore, ThreadClient
from tests.engine.requests import make_config
from tests.fake_executor import FakeExecutor
from tests.streams import add, read_next, read_rest

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
TIMEOUT_S = 20


@asynccontextmanager
async def running_engine(**core_options):
    """Start an engine over an EchoCore, and check in the end that it forgot nothing."""
    client = ThreadClient(EchoCore(**core_options))
    tracker = RequestTracker(Tokenizer(build_tokenizer()), ECHO_INFO, RequestDefaults(eos_ids=(2,)))
    engine = AsyncEngine(client, tracker, EngineMetrics("tiny", ECHO_INFO))
    engine.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield engine
    finally:
        await engine.shutdown()
    assert engine.num_open_requests == 0
    assert tracker.num_open_requests == 0


def make_params(*, max_tokens=5, kind=DELTA, **fields):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **fields)


async def read(engine, prompt, params, **fields):
    stream = await add(engine, prompt, params, **fields)
    try:
        return await read_rest(stream)
    finally:
        stream.close()


def test_deltas_join_to_the_whole():
    async def scenario():
        async with running_engine() as engine:
            outputs = await read(engine, [100, 101, 102], make_params(max_tokens=5))
            (whole,) = await read(
                engine, [100, 101, 102], make_params(kind=RequestOutputKind.FINAL_ONLY)
            )
        token_ids = [i for output in outputs for i in output.outputs[0].token_ids]
        assert token_ids == [100, 101, 102, 100, 101] == whole.outputs[0].token_ids
        assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
        assert [output.finished for output in outputs][-1]
        assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "expected"), [(DELTA, [[100], [101, 102]]), (CUMULATIVE, [[100], [100, 101, 102]])]
)
def test_what_was_not_read_in_time_is_one_output(kind, expected):
    async def scenario():
        tracker = RequestTracker(Tokenizer(build_tokenizer()), ECHO_INFO, RequestDefaults())
        client = ThreadClient(core := EchoCore())
        engine = AsyncEngine(client, tracker, EngineMetrics("tiny", ECHO_INFO))
        stream = await add(engine, [100, 101, 102], make_params(max_tokens=3, kind=kind))
        core.apply(client.sent())
        engine._update(core.step())
        outputs = [await read_next(stream)]
        engine._update(core.step())
        engine._update(core.step())
        outputs.append(await read_next(stream))
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.finished for output in outputs] == [False, True]
        with pytest.raises(StopAsyncIteration):
            await read_next(stream)

    asyncio.run(scenario())


def test_abort_hands_over_what_was_not_read():
    async def scenario():
        async with running_engine() as engine:
            stream = await add(engine, [100, 101], make_params(max_tokens=4000), request_id="r")
            await read_next(stream)
            await add(engine, [100], make_params(max_tokens=1))
            engine.abort("r")
            outputs = await read_rest(stream)
            assert len(outputs) == 1
            assert outputs[0].outputs[0].finish_reason == "abort"

    asyncio.run(scenario())


def test_closing_the_stream_aborts_the_request():
    async def scenario():
        async with running_engine(step_time_s=0.002) as engine:
            stream = await add(engine, [100], make_params(max_tokens=4000))
            await read_next(stream)
            stream.close()
            assert engine.num_open_requests == 0
            await read(engine, [100], make_params(max_tokens=1))  # the abort was applied before it
            assert engine._client.core.running == {}

    asyncio.run(scenario())


def test_cancelling_the_reader_aborts_the_request():
    async def scenario():
        async with running_engine(step_time_s=0.002) as engine:
            stream = await add(engine, [100], make_params(max_tokens=4000))
            reader = asyncio.create_task(read(engine, [100], make_params(max_tokens=4000)))
            await read_next(stream)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert engine.num_open_requests == 1
            stream.close()
            await engine.wait_until_idle()

    asyncio.run(scenario())


def test_abort_from_outside_ends_the_stream():
    async def scenario():
        async with running_engine() as engine:
            stream = await add(engine, [100], make_params(max_tokens=4000), request_id="mine")
            engine.abort("mine", "unknown")
            outputs = await read_rest(stream)
            assert outputs[-1].outputs[0].finish_reason == "abort"

    asyncio.run(scenario())


def test_refused_request_leaves_nothing_behind():
    async def scenario():
        async with running_engine() as engine:
            for prompt in ([], [ECHO_INFO.vocab_size], {"prompt": None}):
                with pytest.raises(InvalidRequestError):
                    await add(engine, prompt, make_params())
            assert engine.num_open_requests == 0

    asyncio.run(scenario())


def test_dead_core_ends_every_stream_with_an_error():
    async def scenario():
        async with running_engine() as engine:
            stream = await add(engine, [100], make_params(max_tokens=4000))
            other = await add(engine, [100], make_params(max_tokens=4000), request_id="crash")
            for victim in (stream, other):
                outputs = await read_rest(victim)
                assert outputs[-1].outputs[0].finish_reason == "error"
                assert "crash on demand" in outputs[-1].outputs[0].error
            assert "crash on demand" in await engine.wait_until_dead()
            with pytest.raises(EngineDeadError, match="crash on demand"):
                await add(engine, [100], make_params())

    asyncio.run(scenario())


def test_long_prompt_is_encoded_off_the_event_loop():
    async def scenario():
        async with running_engine() as engine:
            outputs = await read(engine, "ab " * 1200, make_params(max_tokens=1))
            assert len(outputs[-1].prompt_token_ids) > 2000
            thread = await engine.prompts.run(threading.current_thread)
            assert thread.name.startswith("encode")

    asyncio.run(scenario())


def test_stop_string_ends_the_request_in_the_core():
    async def scenario():
        async with running_engine() as engine:
            outputs = await read(engine, "abc", make_params(max_tokens=4000, stop="b"))
            answer = outputs[-1].outputs[0]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", "b")
            await read(engine, [100], make_params(max_tokens=1))
            assert engine._client.core.running == {}

    asyncio.run(scenario())


def test_metrics_count_the_tokens_that_clients_see():
    async def scenario():
        async with running_engine() as engine:
            outputs = await read(engine, "abc", make_params(max_tokens=4000, stop="b"))
            num_seen = sum(len(output.outputs[0].token_ids) for output in outputs)
            await read(engine, [100], make_params(max_tokens=1))  # what the core had sent is here
            text = generate_latest(engine.metrics.registry).decode()
        (line,) = [x for x in text.splitlines() if "request_generation_tokens_sum" in x]
        assert float(line.split()[-1]) == num_seen + 1

    asyncio.run(scenario())


def test_hundred_streams_all_end():
    async def scenario():
        async with running_engine() as engine:
            params = [
                make_params(max_tokens=1 + number % 7, n=1 + number % 2) for number in range(100)
            ]
            results = await asyncio.gather(*(read(engine, [100, 101], p) for p in params))
            for outputs, wanted in zip(results, params, strict=True):
                num = sum(len(answer.token_ids) for o in outputs for answer in o.outputs)
                assert num == wanted.max_tokens * wanted.n
            await engine.wait_until_idle()
            assert engine.stall is None

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_request_whose_time_is_up_ends_with_an_error(kind):
    async def scenario():
        async with running_engine(step_time_s=0.002) as engine:
            params = make_params(max_tokens=4000, kind=kind, n=2)
            stream = await add(engine, [100], params, timeout_s=0.1)
            outputs = await read_rest(stream)
            answers = outputs[-1].outputs
            assert {(a.finish_reason, a.reason_code) for a in answers} == TIMED_OUT
            await read(engine, [100], make_params(max_tokens=1))  # the expiry was applied before it
            assert engine._client.core.running == {}

    asyncio.run(scenario())


TIMED_OUT = {("error", "request_timeout")}


def test_a_request_that_ends_in_time_leaves_no_timer():
    async def scenario():
        async with running_engine() as engine:
            for timeout_s in (None, 60.0, 1e308):
                stream = await add(engine, [100], make_params(), timeout_s=timeout_s)
                assert (await read_rest(stream))[-1].finished
                (prompt,) = stream._prompts
                assert prompt.timer is None or prompt.timer.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_a_time_that_is_none_is_refused(timeout_s):
    async def scenario():
        async with running_engine() as engine:
            with pytest.raises(
                InvalidRequestError, match=r"timeout is .* greater than 0"
            ) as caught:
                await add(engine, [100], make_params(), timeout_s=timeout_s)
            assert caught.value.parameter == "timeout"
            assert engine.num_open_requests == 0

    asyncio.run(scenario())
    for name in ("request_timeout", "stall_timeout"):
        with pytest.raises(ConfigError, match=f"{name} is .* greater than 0"):
            ServingLimits(**{f"{name}_s": timeout_s})


def test_the_engines_time_is_for_requests_without_their_own():
    async def scenario():
        limits = ServingLimits(request_timeout_s=0.05)
        async with running_with(ThreadClient(EchoCore(step_time_s=0.005)), limits) as engine:
            hurried = read(engine, [100], make_params(max_tokens=4000))
            stream = await add(engine, [100], make_params(max_tokens=40), timeout_s=TIMEOUT_S)
            assert (await hurried)[-1].outputs[0].reason_code == "request_timeout"
            assert (await read_rest(stream))[-1].outputs[0].finish_reason == "length"

    asyncio.run(scenario())


class FailingClient(ThreadClient):
    """Raises instead of sending messages of one type."""

    def __init__(self, core, message_type, error):
        super().__init__(core)
        self.message_type, self.error = message_type, error

    def send(self, messages):
        if any(isinstance(message, self.message_type) for message in messages):
            raise self.error
        super().send(messages)


@asynccontextmanager
async def running_with(client, limits=NO_LIMITS):
    tracker = RequestTracker(Tokenizer(build_tokenizer()), ECHO_INFO, RequestDefaults(eos_ids=(2,)))
    engine = AsyncEngine(client, tracker, EngineMetrics("tiny", ECHO_INFO), limits=limits)
    engine.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield engine
    finally:
        await engine.shutdown()


def test_a_request_that_cannot_be_sent_leaves_nothing_behind():
    async def scenario():
        client = FailingClient(EchoCore(), AddRequest, OverflowError("too large"))
        async with running_with(client, ServingLimits(stall_timeout_s=0.01)) as engine:
            with pytest.raises(OverflowError):
                await read(engine, [100], make_params())
            assert engine.num_open_requests == 0
            await engine.wait_until_idle()
            await asyncio.sleep(0.02)
            assert engine.stall is None, "the core owes no answer to what it never got"

    asyncio.run(scenario())


def test_a_core_that_dies_at_a_stop_string_ends_every_stream():
    async def scenario():
        client = FailingClient(EchoCore(), FinishRequest, EngineDeadError("it died"))
        async with running_with(client) as engine:
            prompt = build_tokenizer().encode("abc", add_special_tokens=False)
            stopped = read(engine, prompt, make_params(max_tokens=50, stop="b"))
            other = read(engine, [100], make_params(max_tokens=10**4))
            outputs = await asyncio.gather(stopped, other)
        reasons = [result[-1].outputs[0].finish_reason for result in outputs]
        assert reasons == ["stop", "error"]

    asyncio.run(scenario())


def make_real_core():
    """An engine core that runs one request at a time, on a device that answers at once."""
    config = make_config(max_num_seqs=1, num_blocks=2_048, max_model_len=4_096)
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=1, vocab_size=300)
    return EngineCore(executor, config, lag=0)


async def start_and_queue(engine):
    """Let one request run and another wait; returns their streams."""
    params = make_params(max_tokens=3_000, ignore_eos=True)
    first = await add(engine, [100, 101], params, request_id="first")
    await read_next(first)
    return first, await add(engine, [100, 102, 103], params, request_id="second")


def test_more_than_may_wait_is_refused_with_a_time_to_retry():
    async def scenario():
        limits = ServingLimits(queue_caps=QueueCaps(1))
        async with running_with(ThreadClient(make_real_core()), limits) as engine:
            _, waiting = await start_and_queue(engine)
            with pytest.raises(QueueFullError, match="1 requests wait") as caught:
                await add(engine, [100], make_params())
            assert caught.value.reason_code == "queue_full_requests"
            assert caught.value.retry_after_s >= 1
            labels = 'engine="0",model_name="tiny",reason_code="queue_full_requests"'
            scraped = generate_latest(engine.metrics.registry).decode()
            assert f"octavo_requests_refused_total{{{labels}}} 1.0" in scraped
            waiting.close()
            (await add(engine, [100], make_params())).close()

    asyncio.run(scenario())


def test_a_request_is_explained_while_it_waits_and_after_its_end():
    async def scenario():
        async with running_with(ThreadClient(make_real_core())) as engine:
            first, second = await start_and_queue(engine)
            (running,) = await engine.explain("first")
            (waiting,) = await engine.explain("second")
            assert (running.state, waiting.state) == ("running", "waiting")
            assert waiting.place_in_queue == 0
            first.close()
            second.close()
            (ended,) = await engine.explain("second")
            assert ended.finish_reason == "abort"
            assert ended.delivered_s is None, "nobody has read it"
            await read(engine, [100], make_params(max_tokens=3, n=2), request_id="third")
            times = [
                (e.arrival_s, e.first_scheduled_s, e.first_token_s, e.ended_s, e.delivered_s)
                for e in await engine.explain("third")
            ]
            assert len(times) == 2
            assert times == [tuple(sorted(times)) for times in times]
            assert await engine.explain("nobody") == []

    asyncio.run(scenario())


def test_an_open_requests_id_can_be_used_again():
    async def scenario():
        async with running_engine() as engine:
            streams = [await add(engine, [100], make_params(), request_id="same") for _ in range(3)]
            assert len({stream.request_id for stream in streams}) == 3
            for stream in streams:
                assert (await read_rest(stream))[-1].finished

    asyncio.run(scenario())


def test_a_question_to_a_core_that_stands_still_is_given_up():
    async def scenario():
        engine = AsyncEngine(ThreadClient(EchoCore()), None, EngineMetrics("tiny", ECHO_INFO))
        engine.control._timeout_s = 0.01
        with pytest.raises(TimeoutError):
            await engine.explain("a")
        # Too late, and nobody asks any more:
        engine.control.update(CoreOutputs(explanations=[Explanation(0, [])]))

    asyncio.run(scenario())


def test_a_question_to_a_dying_core_gets_an_error():
    async def scenario():
        client = FailingClient(EchoCore(), ExplainRequest, EngineDeadError("it died"))
        async with running_with(client) as engine:
            with pytest.raises(EngineDeadError):
                await engine.explain("a")

    asyncio.run(scenario())


def test_nothing_can_be_asked_of_an_engine_that_is_shut_down():
    async def scenario():
        async with running_engine() as engine:
            pass
        for ask in (engine.control.pause, engine.control.resume, engine.control.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="shut down"):
                await ask()

    asyncio.run(scenario())
