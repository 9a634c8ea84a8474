"""API keys over HTTP: who is let in, and what is said to the others."""

import http.client
import socket

import openai
import pytest

from octavo.entrypoints.http.authentication import OPEN_PATHS
from tests.live_server import TIMEOUT_S, running_server

KEYS = ("sk-first", "sk-second")
COMPLETION = {"prompt": "ab", "max_tokens": 2}
GOOD = {"authorization": f"Bearer {KEYS[0]}"}


@pytest.fixture(scope="module")
def guarded():
    with running_server(api_key=list(KEYS), root_path="/llm", has_admin=True) as live:
        yield live


def ask(live, *authorization, path="/v1/models"):
    """Send raw header values and return the status and the body."""
    headers = b"".join(b"authorization: " + value + b"\r\n" for value in authorization)
    with socket.create_connection(("127.0.0.1", live.port), timeout=TIMEOUT_S) as connection:
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
        connection.sendall(head + headers + b"\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.headers, response.read()


def check_refusal(status, headers, data):
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert headers["content-type"] == "application/json"
    assert b'"type":"AuthenticationError"' in data
    assert b'"code":401' in data
    assert not any(key.encode() in data for key in KEYS)


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer sk-first",
        b"Bearer sk-second",
        b"bearer sk-first",
        b"BEARER sk-second",
        b"Bearer sk-first ",
        b"Bearer   sk-first",
        b"  Bearer sk-first\t",
    ],
)
def test_any_of_the_keys_opens_the_api(guarded, value):
    assert ask(guarded, value)[0] == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-first",
        b"Basic sk-first",
        b"Bearersk-first",
        b"Bearer s",
        b"Bearer sk-firs",
        b"Bearer sk-first2",
        b"Bearer SK-FIRST",
        b"Bearer sk-first sk-second",
        b"Bearer sk-first,sk-second",
        b"Bearer \xff\xfe",
        b"Bearer sk-f\xc3\xafrst",
        b"\xff",
        b"Bearer " + b"k" * 8_000,
    ],
)
def test_anything_else_is_401_in_openais_form(guarded, value):
    check_refusal(*ask(guarded, value))


def test_no_header_and_two_headers_are_401(guarded):
    check_refusal(*ask(guarded))
    check_refusal(*ask(guarded, b"Bearer sk-first", b"Bearer sk-first"))


def test_every_route_but_health_wants_a_key(guarded):
    document = guarded.request("GET", "/openapi.json", headers=GOOD).json
    paths = {*document["paths"], "/docs", "/redoc", "/openapi.json", "/", "/nowhere", "/health/"}
    assert len(paths) > 12
    for path in paths - OPEN_PATHS:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            for prefix in ("", "/llm"):
                assert guarded.request(method, prefix + path).status == 401, (method, path)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_needs_no_key(guarded, path):
    assert guarded.get(path).status == 200
    assert guarded.get(f"/llm{path}").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "//v1/models",
        "/v1/models?/health",
        "/v1/models#/health",
        "/ready/v1/models",
        "/llm/health/v1/models",
        "/llm/llm/health",
        "/LLM/health",
    ],
)
def test_no_path_leads_around_the_key(guarded, path):
    assert ask(guarded, path=path)[0] in (400, 401)


def test_streams_and_plain_answers_pass_with_a_key(guarded):
    plain = guarded.post("/v1/completions", COMPLETION, GOOD)
    stream = guarded.post("/v1/completions", COMPLETION | {"stream": True}, GOOD)
    text = "".join(event["choices"][0]["text"] for event in stream.events)
    assert plain.json["choices"][0]["text"] == text != ""


def test_refused_body_is_not_read(guarded):
    connection = guarded.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", str(2**40))
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_official_client_sends_its_key(guarded):
    options = {"base_url": f"{guarded.url}/v1", "timeout": TIMEOUT_S, "max_retries": 0}
    with openai.OpenAI(api_key=KEYS[1], **options) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    with (
        openai.OpenAI(api_key="wrong", **options) as client,
        pytest.raises(openai.AuthenticationError, match="not one of this server's"),
    ):
        client.models.list()


def test_log_shows_no_key(guarded, caplog):
    with caplog.at_level("DEBUG"):
        ask(guarded, b"Bearer sk-first")
        ask(guarded, b"Bearer sk-wrong")
        ask(guarded, b"Bearer sk-\xff")
    assert "sk-" not in caplog.text
