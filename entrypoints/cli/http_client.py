"""A client of a running server, on nothing but the standard library: JSON and event streams."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from octavo.config import Environment
from octavo.entrypoints.api_keys import read_client_key
from octavo.errors import ConfigError, OctavoError

DEFAULT_URL = "http://localhost:8000/v1"
CONNECT_TIMEOUT_S = 10.0
DONE = b"[DONE]"


class ServerError(OctavoError):
    """A server cannot be reached, refused a request, or broke a stream off; the message says so."""


def add_connection_options(parser: ArgumentParser) -> None:
    """Add the options of every command that talks to a server."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="where the server's API is [%(default)s]"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's key [the first in OCTAVO_API_KEY]"
    )


def create_client(args: Namespace) -> "HttpClient":
    """Return a client of the server that these options name."""
    return HttpClient(args.url, api_key=read_client_key(args.api_key, Environment.read()))


class HttpClient:
    """Sends requests to one server; each has a connection of its own, so threads may share it."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL is {url!r}; it must be like http://localhost:8000")
        self._url = url
        self._connection_type = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        self._address = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def get(self, path: str) -> bytes:
        """Return the body of a GET request.

        Raises:
            ServerError: the server cannot be reached, or it refuses.
        """
        with closing(self._connect()) as connection:
            response = self._send(connection, "GET", path, None)
            return response.read()

    def get_first_model(self) -> str:
        """Return the name of the model that the server has."""
        models: list[dict[str, Any]] = json.loads(self.get("/models"))["data"]
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a request's stream as they come.

        Raises:
            ServerError: the request is refused, or the stream ends before its end.
        """
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, json.dumps({**body, "stream": True}))
            for line in _read_lines(response):
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == DONE:
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield event
        raise ServerError("the server closed the stream before its end")

    def _connect(self) -> HTTPConnection:
        host, port = self._address
        return self._connection_type(host, port, timeout=CONNECT_TIMEOUT_S)

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: str | None
    ) -> HTTPResponse:
        headers = self._headers | ({"content-type": "application/json"} if body else {})
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer may take its time
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise ServerError(f"no server answers at {self._url}: {error}") from error
        if response.status >= 400:
            raise ServerError(_read_error(response))
        return response


def _read_lines(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a body; a connection that breaks ends them like one that is closed."""
    with suppress(OSError, HTTPException):
        yield from response


def _read_error(response: HTTPResponse) -> str:
    data = response.read()
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {response.status} {response.reason}"
