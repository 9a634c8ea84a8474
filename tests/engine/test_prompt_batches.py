"""Several prompts in one request: all or none, their outputs told apart, one id for them all."""

import asyncio

import numpy as np
import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.conditions import Conditions
from octavo.engine.door import QueueCaps
from octavo.engine.limits import NO_LIMITS, ServingLimits
from octavo.engine.metrics import EngineMetrics
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.request_factory import RequestDefaults
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import EngineDeadError, InvalidRequestError, QueueFullError
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.checkpoints import build_tokenizer
from tests.echo_core import ECHO_INFO, EchoCore, ThreadClient

TOKENIZER = Tokenizer(build_tokenizer())


def make_prompts(*prompts):
    return [EncodedPrompt(np.array(ids, dtype=np.int32)) for ids in prompts]


def make_params(*, max_tokens=4, kind=RequestOutputKind.DELTA, **fields):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **fields)


def run(scenario, *, limits=NO_LIMITS, step_time_s=0.0):
    """Run a coroutine function with a started engine and its core."""

    async def main():
        client = ThreadClient(core := EchoCore(step_time_s=step_time_s))
        tracker = RequestTracker(TOKENIZER, ECHO_INFO, RequestDefaults())
        engine = AsyncEngine(client, tracker, EngineMetrics("tiny", ECHO_INFO), limits)
        engine.start()
        try:
            await scenario(engine, core)
        finally:
            await engine.shutdown()
        assert engine.num_open_requests == tracker.num_open_requests == 0
        assert engine.open_request_ids == []

    asyncio.run(main())


async def read(streams):
    """Return the token ids of each answer by (place of the prompt, index), and every finish."""
    ids, reasons = {}, {}
    async for place, output in streams:
        for answer in output.outputs:
            key = (place, answer.index)
            assert key not in reasons, "something came after the end"
            ids.setdefault(key, []).extend(answer.token_ids)
            if answer.finished:
                reasons[key] = answer.finish_reason
    return ids, reasons


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_outputs_are_told_apart_by_the_place_of_their_prompt(kind):
    async def scenario(engine, core):
        prompts = make_prompts([100], [200, 201], [5])
        streams = await engine.add(prompts, make_params(n=2, kind=kind), Conditions("r"))
        ids, reasons = await read(streams)
        answers = {0: [100] * 4, 1: [200, 201, 200, 201], 2: [5] * 4}
        assert ids == {(place, index): answers[place] for place in range(3) for index in range(2)}
        assert reasons == dict.fromkeys(ids, "length")

    run(scenario)


@pytest.mark.parametrize("prompts", [([100], [400]), ([100], [5] * 4096)])
def test_one_refused_prompt_refuses_all_before_anything_is_done(prompts):
    async def scenario(engine, core):
        with pytest.raises(InvalidRequestError, match="prompt 1 "):
            await engine.add(make_prompts(*prompts), make_params(), Conditions())
        assert engine.num_open_requests == 0
        streams = await engine.add(make_prompts([7]), make_params(), Conditions())
        await read(streams)
        assert core.num_added == 1

    run(scenario)


def test_a_full_queue_refuses_all_or_none():
    async def scenario(engine, core):
        long = make_params(max_tokens=4000)
        first = await engine.add(make_prompts([1]), long, Conditions())
        with pytest.raises(QueueFullError):
            await engine.add(make_prompts([2], [3], [4]), long, Conditions())
        assert engine.num_open_requests == 1
        first.close()

    run(scenario, limits=ServingLimits(queue_caps=QueueCaps(max_requests=2)), step_time_s=0.05)


def test_all_prompts_have_one_id_by_which_they_are_aborted():
    async def scenario(engine, core):
        long = make_params(max_tokens=4000)
        streams = await engine.add(make_prompts([1], [2]), long, Conditions("mine"))
        other = await engine.add(make_prompts([3]), make_params(), Conditions("other"))
        assert engine.open_request_ids == ["mine", "other"]
        assert [entry.request_id for entry in engine.list_open(9)] == ["mine", "mine", "other"]
        engine.abort("mine")
        _, reasons = await read(streams)
        assert reasons == {(0, 0): "abort", (1, 0): "abort"}
        async for _ in other:
            pass

    run(scenario, step_time_s=0.005)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_an_id_that_is_taken_is_told_apart(first, second):
    async def scenario(engine, core):
        long = make_params(max_tokens=4000)
        streams = [
            await engine.add(make_prompts(*[[7]] * num), long, Conditions("mine"))
            for num in (first, second)
        ]
        one, other = engine.open_request_ids
        assert one == "mine"
        assert other.startswith("mine-")
        engine.abort("mine")
        assert engine.open_request_ids == [other]
        for joined in streams:
            joined.close()

    run(scenario, step_time_s=0.005)


def test_keys_of_a_batch_do_not_hide_a_request_of_that_name():
    async def scenario(engine, core):
        long = make_params(max_tokens=4000)
        single = await engine.add(make_prompts([7]), long, Conditions("x-1"))
        batch = await engine.add(make_prompts([7], [8]), long, Conditions("x"))
        assert len(engine.open_request_ids) == 2
        single.close()
        batch.close()

    run(scenario, step_time_s=0.005)


def test_closing_aborts_what_has_not_ended():
    async def scenario(engine, core):
        prompts = make_prompts([100], [200])
        streams = await engine.add(prompts, make_params(max_tokens=4000), Conditions())
        await anext(streams)
        streams.close()
        assert engine.num_open_requests == 0
        _, reasons = await read(streams)
        assert set(reasons.values()) == {"abort"}

    run(scenario, step_time_s=0.005)


def test_the_time_of_a_request_is_over_for_all_of_its_prompts():
    async def scenario(engine, core):
        conditions = Conditions(timeout_s=0.05)
        streams = await engine.add(make_prompts([1], [2]), make_params(max_tokens=4000), conditions)
        _, reasons = await read(streams)
        assert reasons == {(0, 0): "error", (1, 0): "error"}

    run(scenario, step_time_s=0.005)


def test_a_core_that_dies_while_it_is_told_ends_every_prompt():
    async def scenario(engine, core):
        def die(messages):
            raise EngineDeadError("gone")

        engine._client.send = die
        streams = await engine.add(make_prompts([1], [2]), make_params(), Conditions())
        _, reasons = await read(streams)
        assert reasons == {(0, 0): "error", (1, 0): "error"}

    run(scenario)
