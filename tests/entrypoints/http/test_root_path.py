"""A server under a path of its own, behind a proxy."""

import pytest

from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError
from tests.live_server import running_server

COMPLETION = {"prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def hidden():
    with running_server(root_path="/llm/one") as live:
        yield live


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
def test_the_proxy_may_cut_the_path_off_or_leave_it(hidden, prefix):
    assert hidden.get(f"{prefix}/health").status == 200
    assert hidden.post(f"{prefix}/v1/completions", COMPLETION).status == 200
    assert hidden.get(f"{prefix}/v1/models/tiny").status == 200
    assert hidden.get("/llm/one/llm/one/health").status == 404


def test_documents_name_the_path_that_browsers_see(hidden):
    assert b"/llm/one/openapi.json" in hidden.get("/docs").data
    assert hidden.get("/openapi.json").json["servers"] == [{"url": "/llm/one"}]


def test_documents_can_be_switched_off():
    with running_server(disable_fastapi_docs=True) as live:
        assert {live.get(path).status for path in ("/docs", "/redoc", "/openapi.json")} == {404}
        assert live.post("/v1/completions", COMPLETION).status == 200


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/l lm", "/llm?", "/../x\n"])
def test_path_that_is_none_is_refused(path):
    with pytest.raises(ConfigError, match="root_path is"):
        ServerSettings(root_path=path)
