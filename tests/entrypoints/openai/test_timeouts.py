"""Requests whose time is up: one error, at once, whatever the engine is doing."""

import pytest

from octavo.engine.limits import ServingLimits
from tests.echo_core import EchoCore
from tests.live_server import running_server

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4000}
BODIES = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}),
]


@pytest.fixture(scope="module")
def slow_server():
    """Serve so slowly that no request ends by itself during a test."""
    with running_server(EchoCore(step_time_s=0.005)) as live:
        live.call(live.service.templates.warm_up())
        yield live


def check_error(error, *, progress):
    assert (error["type"], error["code"]) == ("TimeoutError", 504)
    assert error["reason_code"] == "request_timeout"
    assert f"it was {progress}" in error["message"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_plain_request_is_answered_with_504(slow_server, path, body, n):
    reply = slow_server.post(path, body | {"timeout": 0.1, "n": n})
    assert reply.status == 504
    check_error(reply.json["error"], progress="running, with")
    slow_server.wait_for_metric("vllm:num_requests_running", 0)
    assert slow_server.core.running == {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_ends_with_an_error_and_the_end_mark(slow_server, path, body, n):
    reply = slow_server.post(path, body | {"timeout": 0.1, "n": n, "stream": True})
    assert reply.status == 200
    *chunks, last = reply.events
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == set(range(n))
    check_error(last["error"], progress="running, with")
    slow_server.wait_for_metric("vllm:num_requests_running", 0)
    assert slow_server.core.running == {}


def test_text_that_came_before_the_time_was_up_is_sent(slow_server):
    body = COMPLETION | {"timeout": 0.1, "stream": True}
    *chunks, last = slow_server.post("/v1/completions", body).events
    num_tokens = int(last["error"]["message"].split("with ")[1].split()[0])
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    whole = slow_server.post("/v1/completions", COMPLETION | {"max_tokens": num_tokens})
    assert text == whole.json["choices"][0]["text"]


@pytest.mark.parametrize(
    "timeout", [b"0", b"-1", b"NaN", b"Infinity", b"1e400", b'"5"', b"true", b"[1]", b"{}"]
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_time_that_is_none_is_400(server, timeout, stream):
    body = b'{"prompt": "a", "timeout": %b, "stream": %b}' % (timeout, stream)
    reply = server.post("/v1/completions", body)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "timeout"


@pytest.mark.parametrize("timeout", [None, 60, 0.5e3, 1e308, 10**30])
def test_a_time_that_is_long_enough_changes_nothing(server, timeout):
    body = {"prompt": "a", "max_tokens": 3, "timeout": timeout}
    assert server.post("/v1/completions", body).json["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_time_is_for_requests_without_their_own(stream):
    limits = ServingLimits(request_timeout_s=0.1)
    with running_server(EchoCore(step_time_s=0.005), limits=limits) as server:
        reply = server.post("/v1/completions", COMPLETION | {"stream": stream})
        error = reply.events[-1]["error"] if stream else reply.json["error"]
        check_error(error, progress="running, with")
        body = COMPLETION | {"timeout": 20, "max_tokens": 60}
        assert server.post("/v1/completions", body).status == 200


def test_waiting_requests_get_their_error_while_the_device_stands_still(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        first = server.start_posts("/v1/completions", COMPLETION | {"max_tokens": 2})
        server.wait_until(lambda: core.scheduler.running)
        waiting = [body | {"timeout": 0.2} for _, body in BODIES]
        replies = [server.post(path, body) for (path, _), body in zip(BODIES, waiting, strict=True)]
        device.open()
        assert first()[0].status == 200
        server.wait_for_metric("vllm:num_requests_waiting", 0)
    for reply in replies:
        assert reply.status == 504
        check_error(reply.json["error"], progress="waiting for its first step")
    assert sum(len(step.new_rows) for step in device.steps) == 1, "an expired request was started"


def test_a_running_request_leaves_at_the_next_plan(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        reply = server.post("/v1/completions", COMPLETION | {"timeout": 0.2})
        assert reply.status == 504
        num_steps = len(device.steps)
        device.open()
        server.wait_for_metric("vllm:request_success_total", 1)
        assert len(device.steps) == num_steps
        assert server.metric("vllm:kv_cache_usage_perc") == 0
