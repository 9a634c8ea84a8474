"""Clients that go away: their requests are aborted, whatever they were doing."""

import json
import socket
import struct

import pytest

from tests.echo_core import EchoCore
from tests.live_server import TIMEOUT_S, running_server

LONG = {"max_tokens": 4000}
CASES = [
    (path, fields | LONG | {"stream": stream})
    for path, fields in (
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
    )
    for stream in (False, True)
]


def open_request(server, path, body):
    """Send a request over a raw socket and return the socket."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def close(connection):
    connection.close()


def reset(connection):
    """Close without a farewell, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture(scope="module")
def slow_server():
    """Serve so slowly that no request ends by itself during a test."""
    with running_server(EchoCore(step_time_s=0.005)) as live:
        yield live


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize(("path", "body"), CASES)
def test_client_that_goes_away_aborts_its_request(slow_server, path, body, leave):
    finished = "vllm:request_success_total"
    before = slow_server.metric(finished)
    connection = open_request(slow_server, path, body)
    slow_server.wait_for_metric("vllm:num_requests_running", 1)
    leave(connection)
    slow_server.wait_for_metric(finished, before + 1)
    assert slow_server.core.running == {}
    assert slow_server.service.engine.num_open_requests == 0


def test_waiting_requests_leave_the_queue_when_their_clients_go(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        first = server.start_posts("/v1/completions", {"prompt": "ab", "max_tokens": 2})
        server.wait_until(lambda: core.scheduler.running)
        connections = [open_request(server, *CASES[index % 4]) for index in range(20)]
        server.wait_until(lambda: server.service.engine.num_open_requests == 21)
        for connection in connections:
            reset(connection)
        # Though the device stands still:
        server.wait_until(lambda: server.service.engine.num_open_requests == 1)
        device.open()
        assert first()[0].status == 200
        server.wait_for_metric("vllm:num_requests_waiting", 0)
    assert sum(len(step.new_rows) for step in device.steps) == 1, "a cancelled request was started"


def test_gauges_return_to_zero_without_new_traffic(slow_server):
    connections = [open_request(slow_server, *CASES[index % 4]) for index in range(20)]
    slow_server.wait_for_metric("vllm:num_requests_running", 20)
    assert slow_server.metric("vllm:kv_cache_usage_perc") > 0
    for connection in connections:
        reset(connection)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        slow_server.wait_for_metric(f"vllm:{name}", 0)


def test_client_that_goes_away_inside_its_body_leaves_no_trace(slow_server, caplog):
    for leave in (close, reset):
        connection = socket.create_connection(("127.0.0.1", slow_server.port), timeout=TIMEOUT_S)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 1000\r\n\r\n{"prompt":'
        )
        leave(connection)
    assert slow_server.get("/health").status == 200
    assert caplog.records == []


def test_client_that_reads_slowly_loses_nothing(slow_server):
    body = CASES[1][1] | {"max_tokens": 50}
    connection = open_request(slow_server, "/v1/completions", body)
    slow_server.wait_for_metric("vllm:num_requests_running", 1)
    slow_server.wait_for_metric("vllm:num_requests_running", 0)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(64)
    connection.close()
    assert data.count(b"[DONE]") == 1
    assert data.count(b'"finish_reason":"length"') == 1
