"""What web pages of other sites may do (CORS)."""

import pytest

from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError
from tests.live_server import running_server

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
COMPLETION = {"prompt": "ab", "max_tokens": 2}


def preflight(live, **headers):
    return live.request("OPTIONS", "/v1/completions", headers=PREFLIGHT | headers)


@pytest.fixture(scope="module")
def strict():
    """A server with a key, for the pages of one site."""
    settings = {
        "api_key": ["sk-key"],
        "allowed_origins": ("HTTPS://chat.example", "http://localhost:3000"),
        "allowed_methods": ("get", "post"),
        "allowed_headers": ("authorization",),
        "allow_credentials": True,
    }
    with running_server(**settings) as live:
        yield live


def test_any_page_may_use_a_server_that_names_none(server):
    reply = preflight(server)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    reply = server.post("/v1/completions", COMPLETION, {"origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


def test_requests_of_no_page_have_no_such_headers(server):
    reply = server.post("/v1/completions", COMPLETION)
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_preflight_needs_no_key_and_the_refusal_after_it_can_be_read(strict):
    reply = preflight(strict)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-credentials"] == "true"
    refused = strict.post("/v1/completions", COMPLETION, {"origin": PAGE})
    assert refused.status == 401
    assert refused.json["error"]["type"] == "AuthenticationError"
    assert refused.headers["access-control-allow-origin"] == PAGE
    assert refused.headers["access-control-allow-credentials"] == "true"


def test_page_with_a_key_gets_its_answer_streamed_or_not(strict):
    headers = {"origin": PAGE, "authorization": "Bearer sk-key"}
    for stream in (True, False):
        reply = strict.post("/v1/completions", COMPLETION | {"stream": stream}, headers)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "Origin" in reply.headers["vary"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "https://chat.example.evil.example"},
        {"origin": "http://chat.example"},
        {"origin": "null"},
        {"access-control-request-method": "DELETE"},
        {"access-control-request-headers": "x-other"},
    ],
)
def test_what_is_not_allowed_fails_the_preflight(strict, headers):
    assert preflight(strict, **headers).status == 400


def test_other_pages_get_no_permission_with_the_answer(strict):
    headers = {"origin": "https://evil.example", "authorization": "Bearer sk-key"}
    reply = strict.post("/v1/completions", COMPLETION, headers)
    assert "access-control-allow-origin" not in reply.headers


def test_without_origins_nothing_answers_pages():
    with running_server(allowed_origins=()) as live:
        assert preflight(live).status == 405
        reply = live.post("/v1/completions", COMPLETION, {"origin": PAGE})
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"allow_credentials": True}, "allow_credentials would let every web page"),
        ({"allow_credentials": True, "allowed_origins": (PAGE, "*")}, "allow_credentials would"),
        ({"allowed_origins": ("https://chat.example/",)}, "without a path"),
        ({"allowed_origins": ("chat.example",)}, "allowed_origins has 'chat.example'"),
        ({"allowed_origins": ("",)}, "allowed_origins has ''"),
        ({"allowed_origins": ("https://a, https://b",)}, "allowed_origins has"),
        ({"allowed_methods": ("GET, POST",)}, "allowed_methods has 'GET, POST'"),
        ({"allowed_headers": ("",)}, "allowed_headers has ''"),
    ],
)
def test_rules_that_cannot_work_are_refused_at_the_start(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        ServerSettings(**settings)


@pytest.mark.parametrize(
    "origin", ["null", "http://[::1]:8000", "chrome-extension://abc", "file://"]
)
def test_origins_of_every_kind_can_be_listed(origin):
    assert ServerSettings(allowed_origins=(origin,)).allowed_origins == (origin,)
