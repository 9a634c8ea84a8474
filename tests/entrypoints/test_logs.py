import logging

import pytest

from octavo.entrypoints.logs import configure_http_logging, configure_logging

NAMES = ("octavo", "uvicorn.access", "uvicorn.error")


@pytest.fixture(autouse=True)
def restored():
    """Put the loggers back as they were."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in NAMES]
    filters = list(logging.getLogger("uvicorn.access").filters)
    yield
    for logger, level in before:
        logger.setLevel(level)
    logging.getLogger("uvicorn.access").filters[:] = filters


def is_logged(name, level):
    return logging.getLogger(name).isEnabledFor(getattr(logging, level))


@pytest.mark.parametrize(("level", "least"), [("debug", "DEBUG"), ("error", "ERROR")])
def test_level_is_that_of_octavos_own_messages(level, least):
    configure_logging(level)
    assert is_logged("octavo.engine.core", least)
    assert not is_logged("octavo.engine.core", "WARNING") or level == "debug"
    assert not is_logged("httpx", "INFO")


@pytest.mark.parametrize(
    ("level", "access", "own"),
    [
        ("debug", "INFO", "DEBUG"),
        ("info", "INFO", "WARNING"),
        ("warning", "WARNING", "WARNING"),
        ("error", "ERROR", "ERROR"),
    ],
)
def test_http_server_tells_requests_from_info_on_and_its_steps_from_debug_on(level, access, own):
    configure_http_logging(level, None)
    assert is_logged("uvicorn.access", access)
    assert is_logged("uvicorn.error", own)
    assert is_logged("uvicorn.access", "INFO") is (level in ("debug", "info"))
    assert is_logged("uvicorn.error", "INFO") is (level == "debug")


def test_requests_for_silent_paths_have_no_line(caplog):
    configure_http_logging("info", "/health, /metrics")
    logger = logging.getLogger("uvicorn.access")
    with caplog.at_level("INFO", "uvicorn.access"):
        for path in ("/health", "/metrics?a=b", "/healthy", "/v1/models"):
            logger.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
    paths = [record.args[2] for record in caplog.records]
    assert paths == ["/healthy", "/v1/models"]
