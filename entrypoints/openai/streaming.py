"""Server-sent events: the bytes of a stream, and the response that sends them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.request_stream import RequestStream
from octavo.entrypoints.openai.errors import describe_error, describe_failure
from octavo.entrypoints.openai.forms import ResponseForm, Usage
from octavo.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
NOT_FINISHED = b',"finish_reason":null'


class EventStream(Response):
    """Sends the outputs of a request as events; a client that goes away aborts the request."""

    media_type = "text/event-stream"

    def __init__(
        self, stream: RequestStream, writer: "ChunkWriter", headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._stream = stream
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        async with closed_on_disconnect(receive, self._stream):
            await send(start)
            async for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of everything that has come since the last piece."""
        try:
            async for output in self._stream:
                if piece := self._writer.write(output):
                    yield piece
                if self._writer.is_ended:
                    return
        except Exception as error:  # the border of a request whose status has been sent
            logger.exception("a stream failed")
            yield encode_event(describe_error(500, f"the stream failed: {error!r}")) + DONE


class ChunkWriter:
    """Turns outputs into chunks around a head that is encoded once.

    With ``has_usage`` every chunk says that usage is null, and one more says the totals.
    """

    def __init__(self, head: Mapping[str, Any], form: ResponseForm, *, has_usage: bool) -> None:
        self.is_ended = False
        self._form = form
        self._has_usage = has_usage
        self._usage = Usage()
        self._opened: set[int] = set()
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if has_usage else b"}]}\n\n"

    def write(self, output: RequestOutput) -> bytes:
        """Return the chunks of one output; after the last one, the end of the stream.

        The first answer that fails ends the stream for all, with an error in place of usage, behind
        the text that has come until then.
        """
        self._usage.add(output)
        pieces: list[bytes] = []
        for answer in output.outputs:
            self._write_answer(answer, pieces)
        failed = next((a for a in output.outputs if a.finish_reason == "error"), None)
        if failed is not None:
            pieces.append(self._end(encode_event(describe_failure(failed))))
        elif output.finished:
            pieces.append(self._end(self._describe_usage() if self._has_usage else b""))
        return b"".join(pieces)

    def _end(self, last_event: bytes) -> bytes:
        self.is_ended = True
        return last_event + DONE

    def _describe_usage(self) -> bytes:
        totals = msgspec.json.encode(self._usage.describe())
        return self._head + b'],"usage":' + totals + b"}\n\n"

    def _write_answer(self, answer: CompletionOutput, pieces: list[bytes]) -> None:
        if answer.finish_reason == "error" and not answer.text:
            return
        if answer.index not in self._opened:
            self._opened.add(answer.index)
            if self._form.opening is not None:
                self._write_choice(answer.index, self._form.opening, NOT_FINISHED, pieces)
        logprobs = self._form.logprobs(answer)
        if not answer.text and logprobs is None and not answer.finished:
            return  # the text is held back, inside a character or what may be a stop string
        content = self._form.chunk_content(answer.text)
        self._write_choice(answer.index, content, _describe_finish(answer), pieces, logprobs)

    def _write_choice(
        self,
        index: int,
        content: bytes,
        finish: bytes,
        pieces: list[bytes],
        logprobs: Any = None,
    ) -> None:
        encoded = b"null" if logprobs is None else msgspec.json.encode(logprobs)
        pieces += (
            self._head,
            b'{"index":%d,' % index,
            content,
            b',"logprobs":',
            encoded,
            finish,
            self._tail,
        )


@asynccontextmanager
async def closed_on_disconnect(receive: Receive, stream: RequestStream) -> AsyncIterator[None]:
    """Close the stream when the client goes away, and in any case at the end."""
    watcher = asyncio.create_task(_close_on_disconnect(receive, stream.close))
    try:
        yield
    finally:
        watcher.cancel()
        stream.close()


def encode_event(content: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _close_on_disconnect(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()


def _describe_finish(answer: CompletionOutput) -> bytes:
    if not answer.finished or answer.finish_reason == "error":
        return NOT_FINISHED  # an error is an event of its own
    finish = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    return b"," + msgspec.json.encode(finish)[1:-1]
