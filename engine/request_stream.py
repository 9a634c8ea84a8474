"""API process: what the reader of one request gets, as it comes."""

import asyncio
from collections.abc import Callable

from octavo.engine.open_request import OpenRequest
from octavo.outputs import RequestOutput


class RequestStream:
    """The outputs of one request; one reader.

    Nothing is made into an output before it is read, so with DELTA an output holds whatever has
    come since the last one.
    """

    def __init__(
        self, request_id: str, *, close: Callable[[str], None], note_delivery: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.timer: asyncio.TimerHandle | None = None
        """Ends the request when its time is up; cancelled when it ends before."""
        self._close = close
        self._note_delivery = note_delivery
        self._unread: OpenRequest | RequestOutput | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Return what has come since the last read; wait if that is nothing."""
        if self._unread is None:
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        unread, self._unread = self._unread, None
        assert unread is not None
        if self._is_ended:
            self._note_delivery()
        return unread.take_output() if isinstance(unread, OpenRequest) else unread

    def note(self, news: OpenRequest | RequestOutput) -> None:
        """Wake the reader: the request has an output to take, or this is its last one."""
        self._unread = news
        self._is_ended = news.finished
        if self._is_ended and self.timer is not None:
            self.timer.cancel()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_ended:
            self._close(self.request_id)
