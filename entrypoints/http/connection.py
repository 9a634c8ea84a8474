"""One client's connection: how much it may send before it is known, and how long that may take.

Everything else about HTTP is uvicorn's. Costs nothing for a request that comes in one piece.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from octavo.entrypoints.http.authentication import OPEN_PATHS
from octavo.entrypoints.http.errors import describe_error, error_response

logger = logging.getLogger(__name__)

NUM_HEALTH_CONNECTIONS = 32
"""Connections beyond the limit that are kept, to answer health checks and refuse the rest."""
MAX_PIPELINED_REQUESTS = 1_000
"""Requests that a client may send before it has the answer to an earlier one."""


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
        self._answering: RequestResponseCycle | None = None
        """The request that is answered, or was last; ``cycle`` is the one that came last."""
        self._is_in_head = False
        self._is_receiving = False
        self._num_advances = 0
        self._num_idle_bytes = 0
        """Received since a request began or a part of a body came: of heads and trailers."""
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
        """Forget the client; the application is told with the request that it is answering."""
        self._stop_receive_timer()
        self.resume_writing()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read what has come; what is only the begin of a request has to go on in time."""
        self._unset_keepalive_if_required()
        num_advances = self._num_advances
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(*self._refusal)
        if self._is_receiving and self._num_advances == num_advances:
            self._num_idle_bytes += len(data)
            if self._num_idle_bytes > self._limits.max_header_bytes:
                self._refuse(*self._describe_long_head())
        if self._is_waited_for:
            if self._receive_timer is None:
                self._start_receive_timer()
        else:
            self._stop_receive_timer()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._note_advance()
        self._is_in_head = self._is_receiving = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what is behind a body is nothing that anybody asks for."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, if the head is within the limits."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        limits = self._limits
        if len(self.headers) > limits.max_header_count or num_bytes > limits.max_header_bytes:
            self._refusal = self._describe_long_head()
            raise ValueError("the head is too long")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return  # ``_feed`` comes back with the same head
        self._is_in_head = False
        super().on_headers_complete()
        if self._answering is None or self._answering.response_complete:
            self._answering = self.cycle
        elif len(self.pipeline) > MAX_PIPELINED_REQUESTS:
            raise ValueError("too many requests wait for their turn")
        else:
            self.flow.resume_reading()  # uvicorn would not hear that the client goes away

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._note_advance()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if not self._is_in_head:
            self._is_receiving = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the request that waits behind the one that was answered, if there is one."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

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
        if self._answering is None or self._answering.response_complete:
            return False
        return not self._is_in_body or self._answering is not self.cycle

    @property
    def _is_in_body(self) -> bool:
        """True while the rest of ``cycle`` has to come."""
        return self._is_receiving and not self._is_in_head

    def _feed(self, data: bytes) -> None:
        """Parse, which calls back.

        Who offers to speak another protocol is answered in this one (RFC 9110, 7.8). The parser
        takes whatever follows such an offer for the other protocol, so it gets the head again
        without the offer.

        Raises:
            HttpParserError: this is not HTTP, or not within the limits.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                self.parser.feed_data(self._restate_head())
                rest = rest[offer.args[0] :]

    def _restate_head(self) -> bytes:
        """Return the head that was just read, without an offer to change the protocol."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _note_advance(self) -> None:
        self._num_advances += 1
        self._num_idle_bytes = 0

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
        elif not self._is_receiving:
            self.transport.close()
        else:
            timeout_s = self._limits.receive_timeout_s
            text = f"the request was not complete after {timeout_s:g} s"
            self._refuse(408, text, "request_too_slow")

    def _describe_long_head(self) -> tuple[int, str, str]:
        limits = self._limits
        text = (
            f"what is around the body of the request has more than {limits.max_header_bytes} bytes"
            f" or {limits.max_header_count} headers"
        )
        return 431, text, "headers_too_large"

    def _refuse(self, status: int, message: str, reason_code: str) -> None:
        """Answer outside of the application, unless an answer has begun, and close."""
        if self.transport.is_closing():
            return
        logger.info("refused a request: %s", message)
        has_begun = self._is_in_body and self.cycle.response_started
        if has_begun or self._is_answering_another:
            self.transport.close()
            return
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
