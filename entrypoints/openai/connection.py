"""One client's connection: how much it may send before it is known, and how long that may take.

Everything else about HTTP is uvicorn's. Costs nothing for a request that comes in one piece.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.entrypoints.openai.authentication import OPEN_PATHS
from octavo.entrypoints.openai.errors import describe_error, error_response

logger = logging.getLogger(__name__)

NUM_HEALTH_CONNECTIONS = 32
"""Connections beyond the limit that are kept, to answer health checks and refuse the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one client may cost before its request is understood."""

    max_connections: int
    max_header_bytes: int
    max_header_count: int
    receive_timeout_s: float
    """From a request's first byte, or from the connection, to the request's last byte."""
    send_timeout_s: float
    """How long a client may leave unread what is sent to it."""


class GuardedConnection(HttpToolsProtocol):
    """A connection with limits; what breaks one is answered in OpenAI's form where it can be."""

    def __init__(self, *, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._num_requests = 0
        self._is_in_head = False
        self._is_receiving = False
        self._num_head_bytes = 0
        self._refusal = (400, "the request is not valid HTTP/1.1", "invalid_http")
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(
        self,
        transport: asyncio.Transport,  # type: ignore[override]  # uvicorn narrows it as well
    ) -> None:
        """Take a client in, or tell it to come back."""
        super().connection_made(transport)
        num_surplus = len(self.connections) - self._limits.max_connections
        if num_surplus > NUM_HEALTH_CONNECTIONS:
            transport.close()
            return
        if num_surplus > 0:
            self.app = partial(_answer_health_only, self.app)
        self._start_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_receive_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has come; what is only the begin of a request has to go on in time."""
        num_requests = self._num_requests if self._is_in_head else None
        super().data_received(data)
        if self._is_in_head and self._num_requests == num_requests:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_header_bytes:
                self._refuse(*self._describe_long_head())
        if self._is_waited_for:
            if self._receive_timer is None:
                self._start_receive_timer()
        else:
            self._stop_receive_timer()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._num_requests += 1
        self._num_head_bytes = 0
        self._is_in_head = self._is_receiving = True

    def on_headers_complete(self) -> None:
        """Begin to answer, if the head is within the limits."""
        self._is_in_head = False
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        limits = self._limits
        if len(self.headers) > limits.max_header_count or num_bytes > limits.max_header_bytes:
            self._refusal = self._describe_long_head()
            raise ValueError("the head is too long")  # goes to ``send_400_response``
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request."""
        self._is_receiving = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read."""
        self._refuse(*self._refusal)

    def pause_writing(self) -> None:
        """Give a client that does not read some time."""
        super().pause_writing()
        if self._send_timer is None:
            timeout_s = self._limits.send_timeout_s
            self._send_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: it reads."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    @property
    def _is_waited_for(self) -> bool:
        """True when the client's turn has come, and not the server's.

        Empty lines before a request are no request, but they end uvicorn's own wait for one.
        """
        return self._is_receiving or self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering_another(self) -> bool:
        """True while the client gets an answer to a request before the one that it sends."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return is_answering and (self._is_in_head or bool(self.pipeline))

    def _start_receive_timer(self) -> None:
        timeout_s = self._limits.receive_timeout_s
        self._receive_timer = self.loop.call_later(timeout_s, self._give_up_receiving)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _give_up_receiving(self) -> None:
        if self.flow.read_paused or self._is_answering_another:
            self._start_receive_timer()
        elif not self._is_receiving or (not self._is_in_head and self.cycle.response_started):
            self.transport.close()
        else:
            timeout_s = self._limits.receive_timeout_s
            text = f"the request was not complete after {timeout_s:g} s"
            self._refuse(408, text, "request_too_slow")

    def _describe_long_head(self) -> tuple[int, str, str]:
        limits = self._limits
        text = (
            f"the head of the request has more than {limits.max_header_bytes} bytes or"
            f" {limits.max_header_count} headers"
        )
        return 431, text, "headers_too_large"

    def _refuse(self, status: int, message: str, reason_code: str) -> None:
        """Answer outside of the application, and close."""
        if self.transport.is_closing():
            return
        logger.info("refused a request: %s", message)
        body = msgspec.json.encode(describe_error(status, message, reason_code=reason_code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


async def _answer_health_only(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer on a connection beyond the limit: a busy server is not a dead one."""
    if scope["path"].endswith(tuple(OPEN_PATHS)):
        return await app(scope, receive, send)
    headers = {"retry-after": "1", "connection": "close"}
    refusal = error_response(
        503,
        "the server has as many connections as it can take",
        reason_code="too_many_connections",
        headers=headers,
    )
    return await refusal(scope, receive, send)
