"""The commands' own client, against a real server."""

import socket
from argparse import Namespace

import pytest

from octavo.entrypoints.cli.http_client import HttpClient, ServerError, create_client
from octavo.errors import ConfigError
from tests.live_server import running_server

BODY = {"prompt": "abc", "max_tokens": 6}


@pytest.fixture
def client(server):
    return HttpClient(f"{server.url}/v1/")


def test_first_model_is_found(client):
    assert client.get_first_model() == "tiny"


def test_stream_yields_events_until_the_end(client):
    events = list(client.stream("/completions", BODY))
    assert "".join(event["choices"][0]["text"] for event in events) == " abc a"


def test_refusal_is_told_in_the_servers_words(client):
    with pytest.raises(ServerError, match="temperature is -1"):
        list(client.stream("/completions", BODY | {"temperature": -1}))
    with pytest.raises(ServerError, match="Not Found"):
        client.get("/nothing")


def test_key_is_sent_from_the_option_or_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-first,sk-second")
    with running_server(api_key=["sk-first"]) as live:
        for option, is_known in (("sk-first", True), (None, True), ("sk-second", False)):
            client = create_client(Namespace(url=f"{live.url}/v1", api_key=option))
            if is_known:
                assert client.get_first_model() == "tiny"
                assert list(client.stream("/completions", BODY))
            else:
                with pytest.raises(ServerError, match="the API key is not one of this server's"):
                    client.get_first_model()


def test_key_that_no_header_can_carry_is_refused():
    with pytest.raises(ConfigError, match="api_key has a key with a space"):
        create_client(Namespace(url="http://localhost", api_key="a\r\nb"))


def test_absent_server_is_named():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ServerError, match=f"no server answers at http://127.0.0.1:{port}"):
        HttpClient(f"http://127.0.0.1:{port}").get("/health")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_url_without_scheme_or_host_is_refused(url):
    with pytest.raises(ConfigError, match="it must be like http://localhost:8000"):
        HttpClient(url)


def test_errors_and_ends_inside_a_stream_are_raised(serve_bytes):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    url = serve_bytes(head + b'data: {"error": {"message": "it broke"}}\n\ndata: [DONE]\n\n')
    with pytest.raises(ServerError, match="it broke"):
        list(HttpClient(url).stream("/x", {}))
    url = serve_bytes(head + b'data: {"choices": []}\n\n')
    with pytest.raises(ServerError, match="closed the stream before its end"):
        list(HttpClient(url).stream("/x", {}))


def test_answer_that_is_no_json_is_described_by_its_status(serve_bytes):
    url = serve_bytes(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\nno")
    with pytest.raises(ServerError, match="the server answers 502 Bad Gateway"):
        HttpClient(url).get("/x")
