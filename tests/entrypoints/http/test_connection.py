"""Clients that send too much, too slowly, or never read; others do not notice."""

import contextlib
import json
import logging
import re
import socket
import time

import pytest

from octavo.entrypoints.file_limit import RESERVED_FILES, choose_max_connections
from octavo.entrypoints.http.connection import NUM_HEALTH_CONNECTIONS
from octavo.entrypoints.http.listener import SEND_TIMEOUT_S, bind
from octavo.entrypoints.openai import server as server_module
from tests.echo_core import EchoCore
from tests.live_server import TIMEOUT_S, running_server

COMPLETION = {"prompt": "ab", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: 30\r\n"
BODY = b'{"prompt":"ab","max_tokens":2}'
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = b'{"prompt":"ab","max_tokens":4000,"ignore_eos":true,"stream":true}'


def as_chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class RawClient:
    """A connection on which anything can be sent."""

    def __init__(self, live):
        self.socket = socket.create_connection(("127.0.0.1", live.port), timeout=TIMEOUT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, *pieces):
        for piece in pieces:
            self.socket.sendall(piece)

    def send_until_refused(self, piece, *, interval_s=0.0):
        """Send a piece again and again; the server must put an end to it."""
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                self.send(piece)
                time.sleep(interval_s)
        assert time.monotonic() < deadline, "the server goes on to listen"

    def read(self):
        """Read until the server closes."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65_536):
                data += piece
        return data


def check_refusal(data, status, reason_code):
    """The last response on a connection is an error in OpenAI's form, and then it is closed."""
    head, _, body = data.rpartition(b"\r\n\r\n")
    head = head[head.rindex(b"HTTP/1.1 ") :]
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["reason_code"]) == (status, reason_code)


def check_alive(live):
    assert live.post("/v1/completions", COMPLETION).status == 200


@pytest.fixture
def impatient(monkeypatch):
    """A server that waits for clients for a moment only."""
    monkeypatch.setattr(server_module, "RECEIVE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server_module, "SEND_TIMEOUT_S", 0.3)
    with running_server(EchoCore(step_time_s=0.001)) as live:
        yield live


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 257 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a" * 70_000 + b": b\r\n\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"b" * 1_000_000,
        b"GET /" + b"a" * 1_000_000,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200_000,
    ],
)
def test_long_head_is_431_whether_it_ends_or_not(server, head):
    with RawClient(server) as client, contextlib.suppress(ConnectionError):
        client.send(*(head[i : i + 30_000] for i in range(0, len(head), 30_000)))
    with RawClient(server) as client:
        client.send(head[:200_000])
        if len(head) < 200_000:
            check_refusal(client.read(), 431, "headers_too_large")
    check_alive(server)


def test_endless_head_is_refused_before_it_fills_the_memory(server):
    with RawClient(server) as client:
        client.send(b"GET /health HTTP/1.1\r\na: ")
        client.send_until_refused(b"b" * 65_536)
    check_alive(server)


def test_head_within_the_limits_is_read_in_any_pieces(server):
    head = b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"c: " + b"d" * 60_000 + b"\r\n"
    with RawClient(server) as client:
        client.send(*(head[i : i + 7_000] for i in range(0, len(head), 7_000)))
        client.send(b"connection: close\r\n\r\n")
        assert client.read().startswith(b"HTTP/1.1 200 ")


def test_limits_of_heads_are_settings():
    with running_server(max_header_bytes=2_000, max_header_count=3) as live:
        for head in (b"a: b\r\n" * 4, b"a: " + b"b" * 2_100 + b"\r\n"):
            with RawClient(live) as client:
                client.send(b"GET /health HTTP/1.1\r\n" + head + b"\r\n")
                check_refusal(client.read(), 431, "headers_too_large")
        assert live.get("/health").status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\na: \x00\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_openais_form(server, data):
    with RawClient(server) as client:
        client.send(data)
        check_refusal(client.read(), 400, "invalid_http")
    check_alive(server)


def test_what_is_not_http_is_no_warning(server, caplog):
    with RawClient(server) as client:
        client.send(b"hello\r\n\r\n")
        check_refusal(client.read(), 400, "invalid_http")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("behind_body", [b"0\r\n", b"1;"])
@pytest.mark.parametrize("piece", [b"a" * 30_000, b"a: b\r\n" * 5_000])
def test_what_is_behind_a_body_has_an_end(server, behind_body, piece):
    with RawClient(server) as client:
        client.send(HEAD + CHUNKED + b"2\r\n{}\r\n" + behind_body)
        client.send_until_refused(piece)
    check_alive(server)


def test_trailers_are_no_headers(server):
    trailers = b"x-request-id: late\r\ncontent-type: text/plain\r\n"
    with RawClient(server) as client:
        client.send(HEAD + b"connection: close\r\n" + CHUNKED)
        client.send(as_chunk(BODY), b"0\r\n", trailers, b"\r\n")
        data = client.read()
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"late" not in data


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"nothing-known"])
@pytest.mark.parametrize(
    "pieces",
    [
        [LENGTH + b"\r\n" + BODY],
        [LENGTH + b"\r\n", BODY],
        [LENGTH + b"\r\n", BODY[:9], BODY[9:]],
        [CHUNKED, as_chunk(BODY), b"0\r\n\r\n"],
    ],
)
def test_other_protocol_that_is_offered_costs_no_body(server, caplog, pieces, protocol):
    offer = b"connection: keep-alive, Upgrade\r\nupgrade: " + protocol + b"\r\n"
    last = HEAD + b"connection: close\r\n" + LENGTH + b"\r\n" + BODY
    with RawClient(server) as client:
        client.send(HEAD + offer + pieces[0], *pieces[1:])
        client.send(b"GET /health HTTP/1.1\r\n" + offer + b"\r\n" + HEAD + offer + b"\r\n" + last)
        data = client.read()
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", data)
    assert statuses == [b"200", b"200", b"400", b"200"], "the third has no body"
    assert data.count(b'"finish_reason":"length"') == 2
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("bad", [b"hello\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"])
def test_nothing_is_written_into_an_answer(bad):
    with running_server(EchoCore(step_time_s=0.005)) as live, RawClient(live) as client:
        client.send(HEAD + CHUNKED + as_chunk(ENDLESS) + b"0\r\n\r\n")
        data = client.socket.recv(65_536)
        client.send(bad)
        data += client.read()
        assert data.count(b"HTTP/1.1 ") == 1
        live.wait_for_metric("vllm:num_requests_running", 0)


@pytest.mark.parametrize("body", [ENDLESS, ENDLESS.replace(b"true}", b"false}")])
def test_client_that_leaves_aborts_what_is_answered_though_it_has_asked_for_more(body):
    request = HEAD + CHUNKED + as_chunk(body) + b"0\r\n\r\n"
    with running_server(EchoCore(step_time_s=0.005)) as live:
        with RawClient(live) as client:
            client.send(request)
            live.wait_for_metric("vllm:num_requests_running", 1)
            client.send(request, request)
        live.wait_for_metric("vllm:num_requests_running", 0)
        assert live.core.num_added == 1


def test_requests_that_wait_for_their_turn_are_bounded(server):
    with RawClient(server) as client, contextlib.suppress(ConnectionError):
        client.send(b"GET /version HTTP/1.1\r\n\r\n" * 20_000)
        assert client.read().count(b"HTTP/1.1 200 ") < 20_000
    check_alive(server)


def test_client_that_says_nothing_is_let_go(impatient):
    with RawClient(impatient) as client:
        assert client.read() == b""


def test_empty_lines_do_not_keep_a_connection(impatient):
    with RawClient(impatient) as client:
        start_s = time.monotonic()
        client.send(b"\r\n\r\n")
        assert client.read() == b""
        assert time.monotonic() - start_s < TIMEOUT_S / 2
    with RawClient(impatient) as client:
        client.send(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.socket.recv(65_536).startswith(b"HTTP/1.1 200 ")
        client.send(b"\r\n")
        assert client.read() == b""


@pytest.mark.parametrize(
    "begin",
    [
        b"P",
        b"POST /v1/completions HTTP/1.1\r\na: b\r\n",
        HEAD + b"content-length: 10\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n",
    ],
)
@pytest.mark.parametrize("is_second", [False, True])
def test_request_that_does_not_end_is_408(impatient, begin, is_second):
    with RawClient(impatient) as client:
        if is_second:
            client.send(b"GET /health HTTP/1.1\r\n\r\n")
            assert client.socket.recv(65_536).startswith(b"HTTP/1.1 200 ")
        client.send(begin)
        check_refusal(client.read(), 408, "request_too_slow")
    check_alive(impatient)
    assert impatient.service.engine.num_open_requests == 0


def test_client_that_drips_is_not_faster(impatient):
    with RawClient(impatient) as client:
        client.send(HEAD)
        client.send_until_refused(b"a: b\r\n", interval_s=0.05)


def test_body_that_nobody_reads_does_not_keep_a_connection(impatient):
    with RawClient(impatient) as client:
        client.send(b"POST /nowhere HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
        data = client.read()
    assert data.startswith(b"HTTP/1.1 404 ")
    assert data.count(b"HTTP/1.1") == 1


def test_long_answers_are_no_slow_requests(impatient):
    body = json.dumps({"prompt": "ab", "max_tokens": 800, "ignore_eos": True}).encode()
    with RawClient(impatient) as client:
        # The second one is sent while the first is answered, and read when that has ended.
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        last = request.replace(b"host: x", b"connection: close")
        client.send(request, last[:20])
        time.sleep(0.5)  # longer than the server waits for clients, shorter than an answer
        client.send(last[20:])
        data = client.read()
    assert data.count(b"HTTP/1.1 200 ") == 2
    assert data.count(b'"finish_reason":"length"') == 2


def test_client_that_does_not_read_is_let_go(impatient):
    connections = impatient.server._http.server_state.connections
    with RawClient(impatient) as client:
        client.send(b"GET /openapi.json HTTP/1.1\r\n\r\n" * 500)
        impatient.wait_until(lambda: any(each.flow.write_paused for each in list(connections)))
        impatient.wait_until(lambda: not any(each.flow.write_paused for each in list(connections)))
        assert client.read().count(b"HTTP/1.1 200 ") < 500
    check_alive(impatient)


def test_kernel_sends_at_once_and_looks_for_clients_that_are_gone():
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with (
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as accepted,
        ):
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == 1_000 * SEND_TIMEOUT_S


def test_connections_beyond_the_limit_hear_of_it_and_health_is_still_told():
    with running_server(max_connections=2) as live, contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(RawClient(live)).send(b"GET /")
        live.wait_until(lambda: len(live.server._http.server_state.connections) >= 2)
        refused = live.post("/v1/completions", COMPLETION)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json["error"]["reason_code"] == "too_many_connections"
        assert live.get("/health").status == 200
        assert live.get("/ready").status == 200
        held.close()
        live.wait_until(lambda: live.post("/v1/completions", COMPLETION).status == 200)


def test_flood_of_connections_is_cut_off():
    with running_server(max_connections=1) as live, contextlib.ExitStack() as held:
        clients = [held.enter_context(RawClient(live)) for _ in range(NUM_HEALTH_CONNECTIONS + 9)]
        assert clients[-1].read() == b""
        assert len(live.server._http.server_state.connections) <= NUM_HEALTH_CONNECTIONS + 1


@pytest.mark.parametrize(
    ("soft", "most"), [(1_024, 1_024 - RESERVED_FILES), (100, 50), (-1, 2**20)]
)
def test_limit_of_connections_follows_that_of_files(monkeypatch, soft, most):
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
    assert choose_max_connections(None) == most
    assert choose_max_connections(5) == 5
