import pytest

from octavo.engine.llm_engine import LLMEngine
from octavo.engine.messages import FinishRequest, ResetPrefixCache
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.sampling_params import SamplingParams
from tests.checkpoints import build_tokenizer
from tests.engine.scripted_core import ScriptedClient

TOKENIZER = Tokenizer(build_tokenizer())
LETTERS = TOKENIZER.encode("\nabcdefghij", add_special_tokens=False)[-10:]


def create_engine(output_ids=LETTERS):
    client = ScriptedClient(output_ids)
    return LLMEngine(client, RequestTracker(TOKENIZER, client.info)), client


def run(engine):
    """Step until nothing is left; return the outputs."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_run_to_their_final_outputs():
    engine, _ = create_engine()
    engine.add_request("a", "z", SamplingParams(max_tokens=2))
    engine.add_request("b", "z", SamplingParams(max_tokens=3))
    finished = {output.request_id: output for output in run(engine) if output.finished}
    assert finished["a"].outputs[0].text == "ab"
    assert finished["b"].outputs[0].text == "abc"


def test_step_without_requests_returns_at_once():
    engine, _ = create_engine()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


def test_stop_string_ends_the_request_in_the_core_too():
    engine, client = create_engine()
    engine.add_request("a", "z", SamplingParams(max_tokens=10, stop="bc"))
    outputs = run(engine)
    assert outputs[-1].outputs[0].text == "a"
    assert client.sent[-1] == FinishRequest(0, "bc", 3)
    assert not engine.has_unfinished_requests()


def test_abort_returns_the_final_output_and_leaves_the_others():
    engine, _ = create_engine()
    for name in "ab":
        engine.add_request(name, "z", SamplingParams(max_tokens=4))
    engine.step()
    (aborted,) = engine.abort_request(["a", "unknown"])
    assert (aborted.request_id, aborted.finished) == ("a", True)
    assert aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].text == "a"
    assert [output.request_id for output in run(engine)] == ["b"] * 3


def test_refused_request_leaves_the_engine_usable():
    engine, client = create_engine()
    with pytest.raises(InvalidRequestError):
        engine.add_request("a", [], SamplingParams())
    assert client.sent == []
    engine.add_request("a", "z", SamplingParams(max_tokens=1))
    assert run(engine)[-1].finished


def test_death_of_the_core_ends_every_request():
    engine, client = create_engine()
    engine.add_request("a", "z", SamplingParams(max_tokens=4))
    client.is_dead = True
    with pytest.raises(EngineDeadError, match="the core died"):
        engine.step()
    assert not engine.has_unfinished_requests()


def test_reset_tells_whether_the_whole_cache_was_dropped():
    engine, client = create_engine()
    assert engine.reset_prefix_cache()
    engine.add_request("a", "z", SamplingParams(max_tokens=4))
    assert not engine.reset_prefix_cache()
    assert client.sent[-1] == ResetPrefixCache()
