"""How a server begins and ends."""

import asyncio
import json
import threading

import pytest

from octavo.entrypoints.openai import server as server_module
from tests.echo_core import EchoCore
from tests.live_server import TIMEOUT_S, running_server

SLOW = {"step_time_s": 0.005}


def start_requests(server, max_tokens):
    """Open a stream and a plain request; return a function that waits for both replies."""
    body = {"prompt": "ab", "max_tokens": max_tokens}
    collect = server.start_posts("/v1/completions", body | {"stream": True}, body)
    server.wait_for_metric("vllm:num_requests_running", 2)
    return collect


def test_stop_without_drain_time_aborts_what_is_open():
    with running_server(EchoCore(**SLOW)) as server:
        collect = start_requests(server, max_tokens=4000)
        server.stop()
        stream, plain = collect()
    assert stream.events[-1]["choices"][0]["finish_reason"] == "abort"
    assert plain.json["choices"][0]["finish_reason"] == "abort"
    assert server.status == 0


def test_stop_with_drain_time_lets_requests_finish_and_admits_none():
    with running_server(EchoCore(**SLOW), shutdown_timeout=TIMEOUT_S) as server:
        kept_alive = server.connect()
        kept_alive.request("GET", "/health")
        kept_alive.getresponse().read()
        collect = start_requests(server, max_tokens=100)
        server.stop()
        stream, plain = collect()
        with pytest.raises(OSError, match="refused"):
            server.get("/health")
        kept_alive.close()
    assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert plain.json["usage"]["completion_tokens"] == 100
    assert server.status == 0


def test_request_whose_prompt_is_read_when_the_server_is_told_to_end_is_refused(monkeypatch):
    body = {"prompt": "ab", "max_tokens": 4000}
    with running_server(EchoCore(**SLOW)) as server:
        prompts = server.service.engine.prompts
        encode, begun, may_end = prompts.encode, [], threading.Event()

        async def encode_slowly(*arguments):
            begun.append(arguments)
            await asyncio.to_thread(may_end.wait, TIMEOUT_S)
            return await encode(*arguments)

        monkeypatch.setattr(prompts, "encode", encode_slowly)
        collect = server.start_posts("/v1/completions", body | {"stream": True}, body)
        server.wait_until(lambda: len(begun) == 2)
        server.stop()
        server.call(asyncio.sleep(0))
        may_end.set()
        for refused in collect():
            assert (refused.status, refused.json["error"]["reason_code"]) == (503, "shutting_down")
    assert server.core.num_added == 0


def wait_for_ever(*_):
    return asyncio.Event().wait()


@pytest.mark.parametrize("stage", ["body", "template", "prompt"])
def test_request_that_is_not_admitted_in_time_hears_that_the_server_ends(stage, monkeypatch):
    monkeypatch.setattr(server_module, "GRACE_S", 0.3)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    with running_server(EchoCore(**SLOW)) as server:
        if stage == "template":
            monkeypatch.setattr(server.service.templates, "render", wait_for_ever)
        if stage == "prompt":
            monkeypatch.setattr(server.service.engine.prompts, "encode", wait_for_ever)
        connection = server.connect()
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body) + (stage == "body")))
        connection.endheaders(body.encode())
        server.get("/health")
        server.stop()
        refused = connection.getresponse()
        error = json.loads(refused.read())["error"]
        assert (refused.status, error["reason_code"]) == (503, "shutting_down")
    assert server.status == 0


def test_port_closes_at_once():
    with running_server(EchoCore(**SLOW), shutdown_timeout=TIMEOUT_S) as server:
        collect = start_requests(server, max_tokens=50)
        server.stop()
        server.call(asyncio.sleep(0))
        with pytest.raises(OSError, match="refused"):
            server.connect().connect()
        collect()


def test_drain_time_is_bounded():
    with running_server(EchoCore(**SLOW), shutdown_timeout=0.05) as server:
        collect = start_requests(server, max_tokens=4000)
        server.stop()
        reasons = [reply.data.count(b'"abort"') for reply in collect()]
    assert reasons == [1, 1]


def test_second_stop_ends_at_once():
    killed = []
    options = {"shutdown_timeout": 1000.0, "kill": lambda: killed.append(True)}
    with running_server(EchoCore(**SLOW), **options) as server:
        start_requests(server, max_tokens=4000)
        server.stop()
        server.stop()
    assert killed
    assert server.status == 1


def test_dying_engine_ends_requests_and_then_the_server():
    with running_server(EchoCore(**SLOW)) as server:
        collect = start_requests(server, max_tokens=4000)
        server.kill_core()
        stream, plain = collect()
        assert server.get("/health").status == 503
        server.thread.join(TIMEOUT_S)
    assert stream.status == 200
    assert stream.events[-1]["error"]["code"] == 503
    assert (plain.status, plain.json["error"]["code"]) == (503, 503)
    assert server.status == 1
