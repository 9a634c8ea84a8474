"""What stops the start of a server, before a model is looked for."""

import pytest

from octavo.config import EngineConfig
from octavo.entrypoints import serving
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"chat_template": "missing.jinja"}, {}, "missing.jinja"),
        ({"chat_template": "{% if %}"}, {}, "error in line 1"),
        ({}, {"api_key_file": "missing"}, "missing"),
        ({}, {"ssl_certfile": "missing.crt"}, "missing.crt"),
        ({}, {"enable_admin_endpoints": True}, "API key"),
        ({}, {"host": "999.999.999.999"}, "999.999"),
    ],
)
def test_a_mistake_does_not_wait_for_the_model(monkeypatch, config, settings, words):
    for name in ("configure_logging", "configure_http_logging", "raise_file_limit"):
        monkeypatch.setattr(serving, name, lambda *_: None)
    monkeypatch.setattr(serving.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serving, "resolve_source", lambda *_: pytest.fail("the model is read"))
    with pytest.raises(ConfigError, match=words):
        serving.serve(EngineConfig(**config), ServerSettings(port=0, **settings))
