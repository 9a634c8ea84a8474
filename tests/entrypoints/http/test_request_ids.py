"""The id of a request: who chooses it, where it comes back, and what it may not be."""

import pytest

from tests.live_server import running_server

COMPLETION = {"prompt": "ab", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ENDPOINTS = [("/v1/completions", COMPLETION, "cmpl"), ("/v1/chat/completions", CHAT, "chatcmpl")]


@pytest.fixture(scope="module")
def named():
    with running_server(enable_request_id_headers=True, api_key=["k"], root_path="/llm") as live:
        yield live


@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_clients_id_is_the_id_of_the_response(server, path, body, prefix):
    for stream in (True, False):
        body = body | {"stream": stream}
        header = server.post(path, body, {"X-Request-Id": "mine"})
        field = server.post(path, body | {"request_id": "mine"})
        both = server.post(path, body | {"request_id": "other"}, {"x-request-id": "mine"})
        for reply in (header, field, both):
            ids = {event["id"] for event in (reply.events if stream else [reply.json])}
            assert ids == {f"{prefix}-mine"}
            assert "x-request-id" not in reply.headers


def test_request_is_found_by_the_id_that_its_client_chose(gated):
    core, _ = gated
    with running_server(core) as live:
        live.post("/v1/completions", COMPLETION, {"x-request-id": "mine"})
        (entry,) = live.get("/v1/requests/cmpl-mine").json["data"]
    assert entry["request_id"] == "cmpl-mine"


@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_id_that_could_end_a_line_is_refused(server, path, body, prefix):
    for request_id in ("a\nb", "a b", "ä", "\x1b[31m", "", "a" * 257):
        reply = server.post(path, body | {"request_id": request_id})
        assert (reply.status, reply.json["error"]["param"]) == (400, "request_id")
    for request_id in ("a b", "\xe4", "a" * 257):
        reply = server.post(path, body, {"x-request-id": request_id})
        assert (reply.status, reply.json["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_header_of_the_response_has_the_id_that_was_used(named, path, body, prefix):
    key = {"authorization": "Bearer k"}
    for given, field in ((None, None), ("mine", None), (None, "theirs"), ("mine", "theirs")):
        headers = key | ({"x-request-id": given} if given else {})
        reply = named.post(path, body | ({"request_id": field} if field else {}), headers)
        assert reply.json["id"] == f"{prefix}-{reply.headers['x-request-id']}"
        assert reply.headers["x-request-id"] == (given or field or reply.headers["x-request-id"])


def test_every_other_response_has_one_too(named):
    for reply in (named.get("/health"), named.get("/nowhere"), named.post("/v1/completions", b"")):
        assert len(reply.headers["x-request-id"]) == 32
    refused = named.request("GET", "/v1/models", headers={"x-request-id": "mine"})
    assert (refused.status, refused.headers["x-request-id"]) == (401, "mine")
    hostile = named.request("GET", "/v1/models", headers={"x-request-id": "a b"})
    assert len(hostile.headers["x-request-id"]) == 32
