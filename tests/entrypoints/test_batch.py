import random
import signal
import threading

import msgspec
import pytest

from octavo.engine.core_client import InProcessClient
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.messages import AbortRequests
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.batch import BatchRequest, run_batch
from octavo.entrypoints.interrupts import DeferredInterrupts
from octavo.errors import BatchRefusedError, EngineDeadError, InvalidRequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.checkpoints import build_tokenizer
from tests.engine.requests import make_core
from tests.engine.scripted_core import ScriptedClient

TOKENIZER = Tokenizer(build_tokenizer())
LETTERS = TOKENIZER.encode("\nabcdefghij", add_special_tokens=False)[-10:]


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C interrupts, also where the tests run in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def create_engine(client=None):
    client = client or ScriptedClient(LETTERS)
    return LLMEngine(client, RequestTracker(TOKENIZER, client.info)), client


def request(prompt="z", **params):
    params = {"max_tokens": 3, "output_kind": RequestOutputKind.FINAL_ONLY, **params}
    return BatchRequest(prompt=prompt, params=SamplingParams(**params))


def texts(outputs):
    return [output and output.outputs[0].text for output in outputs]


def run(engine, *requests, show_progress=False):
    return run_batch(engine, requests, show_progress=show_progress)


def test_outputs_come_in_the_order_of_the_prompts():
    engine, _ = create_engine()
    outputs = run(engine, request(max_tokens=3), request(max_tokens=1), request(max_tokens=2))
    assert texts(outputs) == ["abc", "a", "ab"]


def test_no_prompts_give_no_outputs():
    engine, _ = create_engine()
    assert run(engine) == []


def test_others_run_when_some_are_refused():
    engine, _ = create_engine()
    refused = InvalidRequestError("no template", parameter="messages")
    with pytest.raises(BatchRefusedError) as caught:
        run(engine, request(), request([]), request(), request(refused))
    assert texts(caught.value.outputs) == ["abc", None, "abc", None]
    assert str(caught.value) == (
        "2 of 4 prompts were refused: prompt 1: prompt_token_ids is empty; it must have at least"
        " one; prompt 3: no template"
    )
    assert texts(run(engine, request())) == ["abc"]


def test_only_prompt_is_refused_with_its_own_error():
    engine, client = create_engine()
    with pytest.raises(InvalidRequestError) as caught:
        run(engine, request([5] * 64))
    assert caught.value.parameter == "prompt"
    assert client.sent == []


def test_nothing_runs_when_all_are_refused():
    engine, client = create_engine()
    with pytest.raises(BatchRefusedError, match="2 of 2 prompts"):
        run(engine, request([]), request([]))
    assert client.sent == []


class InterruptedClient(ScriptedClient):
    """Gets Ctrl-C inside a step."""

    def __init__(self, num_interrupts=1):
        super().__init__(LETTERS)
        self.num_interrupts = num_interrupts
        self.num_steps = 0

    def receive(self):
        while self.num_interrupts:
            self.num_interrupts -= 1
            signal.raise_signal(signal.SIGINT)
        self.num_steps += 1
        return super().receive()


def test_interrupt_waits_for_the_step_and_leaves_the_engine_usable():
    engine, client = create_engine(InterruptedClient())
    with pytest.raises(KeyboardInterrupt):
        run(engine, request(), request())
    assert client.sent[-1] == AbortRequests((0, 1))
    assert client.num_steps == 2  # the one that was interrupted and the one that reports the ends
    assert texts(run(engine, request())) == ["abc"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait():
    engine, client = create_engine(InterruptedClient(num_interrupts=2))
    with pytest.raises(KeyboardInterrupt):
        run(engine, request())
    assert client.num_steps == 1  # only the one that reports the end


def test_handler_of_the_application_stays_in_place():
    calls = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        engine, _ = create_engine(InterruptedClient())
        assert texts(run(engine, request())) == ["abc"]
    finally:
        signal.signal(signal.SIGINT, previous)
    assert calls == [signal.SIGINT]


def test_other_threads_are_left_alone():
    installed = []

    def use():
        with DeferredInterrupts():
            installed.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert installed == [signal.default_int_handler]


def test_death_of_the_engine_reaches_the_caller():
    engine, client = create_engine()
    client.receive = lambda: client.fail()
    client.fail = lambda: (_ for _ in ()).throw(EngineDeadError("the core died"))
    with pytest.raises(EngineDeadError, match="the core died"):
        run(engine, request())


def test_progress_shows_requests_and_tokens_per_second(capsys):
    engine, _ = create_engine()
    run(engine, request(), request(), show_progress=True)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert "prompt tok/s" in bar
    assert "output tok/s" in bar
    run(engine, request())
    assert capsys.readouterr().err == ""


class Portions:
    """A batch on a fake device, and how many of its requests each step found taken in."""

    def __init__(self, *, num_requests=200, takes_all=False, **fields):
        run = make_core(lag=1, **{"max_num_seqs": 16, "num_blocks": 512, **fields})
        client = InProcessClient(run.core)
        if takes_all:
            client.info = msgspec.structs.replace(client.info, plan_window=None)
        self.executor = run.executor
        self.engine = LLMEngine(client, RequestTracker(None, client.info))
        self.num_taken = []
        draw = random.Random(5).randrange
        self.requests = [
            request(draw(1, 40) * [number], max_tokens=draw(1, 5)) for number in range(num_requests)
        ]

    def run(self):
        """Return the outputs' tokens."""
        submit, add = self.executor.submit, self.engine.add_request
        taken = []

        def count(step):
            self.num_taken.append(len(taken))
            return submit(step)

        def take(request_id, *args, **more):
            add(request_id, *args, **more)
            taken.append(request_id)

        self.executor.submit, self.engine.add_request = count, take
        return [output.outputs[0].token_ids for output in run(self.engine, *self.requests)]

    @property
    def admitted(self):
        """Numbers of the requests in the order in which they were started."""
        return [new.number for step in self.executor.steps for new in step.new_rows]


def test_the_first_step_does_not_wait_for_all_to_be_taken_in():
    portions = Portions()
    portions.run()
    num_tokens = [len(request.prompt) for request in portions.requests]
    assert 64 <= sum(num_tokens[: portions.num_taken[0]]) < 64 + 40
    assert portions.num_taken[-1] == 200


@pytest.mark.parametrize("policy", ["priority", "lpm", "dfs"])
def test_a_policy_that_may_prefer_later_requests_sees_all_of_them(policy):
    portions = Portions(policy=policy, num_requests=20, max_num_batched_tokens=16)
    portions.run()
    assert set(portions.num_taken) == {20}


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 17}, {"num_blocks": 32}])
def test_portions_change_neither_order_nor_outputs(fields):
    runs = [Portions(num_requests=100, takes_all=whole, **fields) for whole in (False, True)]
    outputs = [portions.run() for portions in runs]
    assert runs[0].num_taken[0] < runs[1].num_taken[0] == 100
    assert outputs[0] == outputs[1]
    assert runs[0].admitted == runs[1].admitted


def test_after_a_step_with_room_plans_see_as_many_as_they_look_at():
    portions = Portions()
    portions.requests = [request([7] * 40, max_tokens=1) for _ in range(200)]  # all but one cached
    portions.run()
    first, *others = portions.num_taken
    assert first == 2
    num_started = 0
    for step, num_taken in zip(portions.executor.steps, portions.num_taken, strict=True):
        assert num_taken >= min(200, num_started + 128) or num_taken == first
        num_started += len(step.new_rows)
    assert others[0] >= 128
    run(portions.engine, *portions.requests[:50])
    assert portions.num_taken[len(others) + 1] == first + 200, "as at first"


def test_refusals_in_any_portion_are_told_and_not_counted(capsys):
    portions = Portions()
    portions.requests[3::7] = [request([])] * len(portions.requests[3::7])
    portions.requests.append(request([]))
    with pytest.raises(BatchRefusedError) as caught:
        run(portions.engine, *portions.requests, show_progress=True)
    refused = [index for index, output in enumerate(caught.value.outputs) if output is None]
    assert refused == [*range(3, 200, 7), 200]
    assert "171/171" in capsys.readouterr().err


def test_an_interrupt_leaves_the_rest_out():
    portions = Portions()
    submit = portions.executor.submit

    def interrupt(step):
        portions.executor.submit = submit
        signal.raise_signal(signal.SIGINT)
        return submit(step)

    portions.executor.submit = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(portions.engine, *portions.requests)
    assert not portions.engine.has_unfinished_requests()
    assert len(portions.admitted) < len(portions.requests)


def test_all_arrive_with_the_call():
    portions = Portions()
    outputs = run(portions.engine, *portions.requests)
    assert len({output.metrics.arrival_time for output in outputs}) == 1
