"""What the log of a server looks like, in each of its processes."""

import logging

FORMAT = "%(asctime)s %(levelname)s [%(processName)s] %(name)s: %(message)s"


def configure_logging(level: str = "info") -> None:
    """Log to stderr: warnings of other packages, and what is at least ``level`` of this one."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    logging.getLogger("octavo").setLevel(level.upper())


def configure_http_logging(level: str, silent_paths: str | None) -> None:
    """Say what the HTTP server logs: with ``info`` its requests, with ``debug`` its own steps too.

    Requests for ``silent_paths``, with commas between them, are not logged.
    """
    logging.getLogger("uvicorn.access").setLevel(level.upper())
    is_quiet = level in ("info", "warning")
    logging.getLogger("uvicorn.error").setLevel("WARNING" if is_quiet else level.upper())
    if silent_paths is not None:
        paths = frozenset(path.strip() for path in silent_paths.split(","))
        logging.getLogger("uvicorn.access").addFilter(lambda record: not _is_for(record, paths))


def _is_for(record: logging.LogRecord, paths: frozenset[str]) -> bool:
    """Say whether a line of uvicorn's access log is about one of the paths."""
    arguments = record.args
    assert isinstance(arguments, tuple), f"uvicorn logs {record.msg} with {arguments}"
    _client, _method, path, *_ = arguments
    return str(path).partition("?")[0] in paths
