"""What a stream sends before there is text: a status, comments, or an error with its status."""

import asyncio
import json

import pytest

from tests.echo_core import EchoCore
from tests.entrypoints.openai.test_streaming import (
    ScriptedStream,
    answer_with,
    create_writer,
    make_output,
)
from tests.live_server import TIMEOUT_S, running_server

BODIES = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
]


class SlowStream(ScriptedStream):
    """Waits before each output."""

    def __init__(self, outputs, delay_s):
        super().__init__(outputs)
        self._delay_s = delay_s

    async def __anext__(self):
        if self.unread:
            await asyncio.sleep(self._delay_s)
        return await super().__anext__()


def open_stream(server, path, body):
    connection = server.connect()
    data = json.dumps(body | {"stream": True})
    connection.request("POST", path, data, {"content-type": "application/json"})
    return connection


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_that_waits_is_kept_alive_by_comments(gated, path, body):
    core, device = gated
    with running_server(core) as server:
        server.service.keep_alive_s = 0.02
        device.close()
        connection = open_stream(server, path, body)
        response = connection.getresponse()  # while no token has been made
        assert response.status == 200
        assert [response.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
        device.open()
        events = [line for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
        assert events[-1] == b"data: [DONE]"
        assert len(events) > 1
        connection.close()


def test_a_stream_that_is_busy_sends_no_comments(server):
    reply = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 500, "stream": True})
    assert b": keep-alive" not in reply.data


def test_comments_stop_with_the_stream():
    stream = SlowStream([make_output("a"), make_output("b", finish_reason="stop")], 0.05)
    data = answer_with(stream, create_writer(), keep_alive_s=0.01, wait_s=0.1)
    before, after = data.split(b"data: ", 1)
    assert before.count(b": keep-alive\n\n") >= 2
    assert data.endswith(b"data: [DONE]\n\n")
    assert b": keep-alive" in after


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_request_that_fails_before_its_first_token_has_the_status_of_the_error(
    gated, path, body, stream
):
    core, device = gated
    with running_server(core) as server:
        device.close()
        reply = server.post(path, body | {"timeout": 0.1, "stream": stream})
        device.open()
        server.wait_for_metric("vllm:num_requests_running", 0)
    assert reply.status == 504
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["error"]["reason_code"] == "request_timeout"


def test_after_a_comment_the_error_is_an_event(gated):
    core, device = gated
    with running_server(core) as server:
        server.service.keep_alive_s = 0.02
        device.close()
        body = {"prompt": "abc", "timeout": 0.1, "stream": True}
        reply = server.post("/v1/completions", body)
        device.open()
        server.wait_for_metric("vllm:num_requests_running", 0)
    assert reply.status == 200
    assert reply.data.startswith(b": keep-alive\n\n")
    *_, error, end = reply.data.decode().strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504
    assert end == "data: [DONE]"


class SilentCore(EchoCore):
    """Takes requests and never runs a step."""

    has_work = False


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_dying_engine_fails_waiting_streams_with_its_status(path, body, monkeypatch):
    monkeypatch.setattr("octavo.entrypoints.openai.server.EXIT_DELAY_S", 0.1)
    with running_server(SilentCore()) as server:
        collect = server.start_posts(path, body | {"stream": True, "max_tokens": 4000})
        server.wait_until(lambda: server.service.engine.num_open_requests == 1)
        server.kill_core()
        (reply,) = collect()
        server.thread.join(TIMEOUT_S)
    assert (reply.status, reply.json["error"]["reason_code"]) == (503, "engine_dead")
    assert reply.headers["retry-after"] == "1"


def test_a_client_that_leaves_before_the_first_byte_aborts_its_request(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        connection = open_stream(server, *BODIES[0])
        server.wait_until(lambda: server.service.engine.num_open_requests == 1)
        connection.close()
        server.wait_until(lambda: server.service.engine.num_open_requests == 0)
        device.open()
