"""Server-sent events: the bytes of a stream, and the response that sends them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.errors import choose_retry, describe_error
from octavo.entrypoints.openai.chunk_writer import DONE, ChunkWriter, encode_event
from octavo.outputs import RequestOutput

logger = logging.getLogger(__name__)

MANY_SCORED_TOKENS = 500
"""From here on the log-probabilities of a prompt are written off the event loop."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of server-sent events passes over."""


class Outputs(Protocol):
    """The outputs of a request as they come, each with the place of its prompt."""

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Read them."""

    def close(self) -> None:
        """Abort what has not ended."""


class EventStream(Response):
    """Sends the outputs of a request as events; a client that goes away aborts the request.

    The status is decided by what comes first: text, or an error. After ``keep_alive_s`` without
    anything to send it is 200, and a comment says that the connection lives.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        outputs: Outputs,
        writer: ChunkWriter,
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._outputs = outputs
        self._writer = writer
        self._keep_alive_s = keep_alive_s
        self._send: Send
        self._timer: asyncio.TimerHandle
        self._comment: asyncio.Task[None]
        self._failure: dict[str, Any] | None = None
        self._is_started = False
        self._is_sending = False
        self._is_over = False
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        self._send = send
        async with closed_on_disconnect(receive, self._outputs):
            self._wait_for_silence()
            try:
                await self._send_all()
            finally:
                self._timer.cancel()

    async def _send_all(self) -> None:
        async for piece in self._pieces():
            failure = self._failure or self._writer.failure
            if failure is not None and not self._is_started:
                await self._refuse(failure)
                return
            await self._send_piece(piece)
        self._is_over = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of everything that has come since the last piece."""
        try:
            async for prompt, output in self._outputs:
                if piece := await self._write(prompt, output):
                    yield piece
                if self._writer.is_ended:
                    return
        except Exception as error:  # the border of a request whose status may have been sent
            logger.exception("a stream failed")
            self._failure = describe_error(500, f"the stream failed: {error!r}")
            yield encode_event(self._failure) + DONE

    async def _write(self, prompt: int, output: RequestOutput) -> bytes:
        if len(output.prompt_logprobs or ()) <= MANY_SCORED_TOKENS:
            return self._writer.write(prompt, output)
        return await asyncio.to_thread(self._writer.write, prompt, output)

    async def _send_piece(self, piece: bytes) -> None:
        self._is_sending = True
        if not self._is_started:
            self._is_started = True
            await self._send_start(self.status_code)
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._num_sent += 1
        self._is_sending = False

    async def _refuse(self, failure: dict[str, Any]) -> None:
        """Fail as a plain request does: nothing has been sent."""
        self._is_over = True
        body = msgspec.json.encode(failure)
        self.headers["content-type"] = "application/json"
        self.headers["content-length"] = str(len(body))
        status = failure["error"]["code"]
        self.headers.update(choose_retry(status))
        await self._send_start(status)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_start(self, status: int) -> None:
        await self._send(
            {"type": "http.response.start", "status": status, "headers": self.raw_headers}
        )

    def _wait_for_silence(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._keep_alive_s, self._keep_alive, self._num_sent)

    def _keep_alive(self, num_sent: int) -> None:
        """Send a comment if nothing else has been sent since the last look."""
        if self._num_sent == num_sent:
            self._comment = asyncio.create_task(self._send_comment())
        self._wait_for_silence()

    async def _send_comment(self) -> None:
        if not self._is_sending and not self._is_over:
            await self._send_piece(KEEP_ALIVE)


@asynccontextmanager
async def closed_on_disconnect(receive: Receive, outputs: Outputs) -> AsyncIterator[None]:
    """Close the outputs when the client goes away, and in any case at the end."""
    watcher = asyncio.create_task(_close_on_disconnect(receive, outputs.close))
    try:
        yield
    finally:
        watcher.cancel()
        outputs.close()


async def _close_on_disconnect(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()
