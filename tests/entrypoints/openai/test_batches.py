"""Several prompts in one request to /v1/completions; the core repeats the ids of each."""

import pytest

from octavo.engine.door import QueueCaps
from octavo.engine.limits import ServingLimits
from tests.echo_core import EchoCore
from tests.entrypoints.openai.test_completions import join
from tests.live_server import create_echo_model, running_server

PATH = "/v1/completions"


def complete(server, **fields):
    """Return (text, finish) of each choice in order, which is the same streamed and whole."""
    body = {"max_tokens": 4, **fields}
    whole = server.post(PATH, body)
    assert whole.status == 200, whole.data
    choices = whole.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.post(PATH, body | options).events
    texts = [(choice["text"], choice["finish_reason"]) for choice in choices]
    assert list(join(chunks).values()) == texts
    assert last["usage"] == whole.json["usage"]
    return [text for text, _ in texts], whole.json["usage"]


@pytest.mark.parametrize("prompt", [["ab", "c", "hij"], [[1, 322, 260], [1, 259, 262], [268]]])
def test_choices_stand_in_the_order_of_the_prompts(server, prompt):
    texts, usage = complete(server, prompt=prompt, max_tokens=3)
    singles = [complete(server, prompt=[one], max_tokens=3) for one in prompt]
    assert texts == [text for (text,), _ in singles]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == sum(single[name] for _, single in singles)


def test_each_prompt_has_n_choices(server):
    texts, usage = complete(server, prompt=["ab", "c"], n=3, max_tokens=3)
    assert texts[:3] == [texts[0]] * 3
    assert texts[3:] == [texts[3]] * 3
    assert texts[0] != texts[3]
    assert usage["completion_tokens"] == 18
    assert usage["prompt_tokens"] == 6


def test_each_choice_of_a_batch_may_be_echoed_and_scored(server):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    choices = server.post(PATH, {"prompt": ["ab", "hij"], **fields}).json["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "hij"]
    for choice in choices:
        assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["token_ids"] == []


def test_the_largest_batch_is_served_and_a_larger_one_refused(server):
    added = server.core.num_added
    reply = server.post(PATH, {"prompt": [[5]] * 1024, "max_tokens": 1})
    assert len(reply.json["choices"]) == 1024
    refused = server.post(PATH, {"prompt": [[5]] * 1025, "max_tokens": 1})
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")
    assert server.core.num_added == added + 1024


@pytest.mark.parametrize("bad", ["", [], [345], [5] * 4096, "a" * 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_all_before_any_work(server, bad, stream):
    added = server.core.num_added
    good = "ab" if isinstance(bad, str) else [1, 2]
    prompt = [good, bad, good]
    if bad == "":
        prompt = [[1, 2], [], [3]]  # this tokenizer makes a BOS of an empty text
    reply = server.post(PATH, {"prompt": prompt, "max_tokens": 1, "stream": stream})
    assert reply.status == 400
    assert reply.json["error"]["param"] in ("prompt", "prompt_token_ids")
    assert server.core.num_added == added
    assert server.service.engine.num_open_requests == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_that_the_queue_cannot_hold_is_refused_whole(gated, stream):
    core, device = gated
    limits = ServingLimits(queue_caps=QueueCaps(max_requests=3))
    with running_server(core, limits=limits) as server:
        device.close()
        collect = server.start_posts(PATH, *[{"prompt": "ab", "max_tokens": 2}] * 2)
        server.wait_until(lambda: server.service.engine.num_open_requests == 2)
        batch = {"prompt": ["a", "b", "c"], "max_tokens": 1, "stream": stream}
        refused = server.post(PATH, batch)
        assert server.service.engine.num_open_requests == 2
        device.open()
        assert [reply.status for reply in collect()] == [200, 200]
        assert server.post(PATH, batch).status == 200
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_batch_is_over_for_all(stream):
    with running_server(EchoCore(step_time_s=0.005)) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 4000, "timeout": 0.1, "stream": stream}
        reply = server.post(PATH, body)
        error = reply.events[-1]["error"] if stream else reply.json["error"]
        assert error["reason_code"] == "request_timeout"
        server.wait_for_metric("vllm:num_requests_running", 0)
        assert server.core.running == {}


def test_the_id_of_a_batch_explains_and_shows_all_of_it():
    with running_server(EchoCore(step_time_s=0.005)) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 4000, "request_id": "mine"}
        collect = server.start_posts(PATH, body)
        server.wait_until(lambda: server.service.engine.open_request_ids == ["cmpl-mine"])
        server.loop.call_soon_threadsafe(server.service.engine.abort, "cmpl-mine")
        (reply,) = collect()
    assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["abort", "abort"]


def test_a_scored_prompt_that_is_aborted_is_an_error():
    with running_server(EchoCore(step_time_s=0.2), model=create_echo_model()) as server:
        body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1, "request_id": "x"}
        for stream in (False, True):
            collect = server.start_posts(PATH, body | {"stream": stream})
            server.wait_until(lambda: server.service.engine.num_open_requests == 1)
            server.loop.call_soon_threadsafe(server.service.engine.abort_all)
            (reply,) = collect()
            assert (reply.status, reply.json["error"]["reason_code"]) == (503, "aborted")
