"""API process: what the reader of one request gets, as it comes."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from octavo.engine.open_request import OpenRequest
from octavo.outputs import RequestOutput


class PromptStream:
    """The outputs for one prompt of a request.

    Nothing is made into an output before it is taken, so with DELTA an output holds whatever has
    come since the last one.
    """

    def __init__(self, key: str, request_id: str) -> None:
        self.key = key
        self.request_id = request_id
        """The client's; the prompts of one client's request share it."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the prompt when its time is up; cancelled when it ends before."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when there is something to take that was not there before."""
        self.note_delivery: Callable[[], None] = lambda: None
        """Called when the last output is taken."""
        self._unread: OpenRequest | RequestOutput | None = None
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """True when nothing more will come than there is to take."""
        return self._is_ended

    def take(self) -> RequestOutput:
        """Return what has come since the last time, which is something."""
        unread, self._unread = self._unread, None
        assert unread is not None, f"{self.key} has nothing to read"
        if self._is_ended:
            self.note_delivery()
        return unread.take_output() if isinstance(unread, OpenRequest) else unread

    def note(self, news: OpenRequest | RequestOutput) -> None:
        """There is an output to take, or this is the last one."""
        is_first, self._unread = self._unread is None, news
        self._is_ended = news.finished
        if self._is_ended and self.timer is not None:
            self.timer.cancel()
        if is_first:
            self.on_news()


class RequestStream:
    """The outputs of one request as they come, each with the place of its prompt; one reader.

    Ends when all prompts have ended. Whoever reads it must read to the end or close it.
    """

    def __init__(self, prompts: Sequence[PromptStream], *, close: Callable[..., None]) -> None:
        self.request_id = prompts[0].request_id
        self._prompts = prompts
        self._close = close
        self._num_open = len(prompts)
        self._ready: deque[int] = deque()  # places
        self._waiter: asyncio.Future[None] | None = None
        for place, prompt in enumerate(prompts):
            prompt.on_news = partial(self._note, place)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """Return a place and what has come there since it was last read; wait for it if need be."""
        if not self._ready:
            if not self._num_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        place = self._ready.popleft()
        output = self._prompts[place].take()
        self._num_open -= output.finished
        return place, output

    def close(self) -> None:
        """Abort what has not ended."""
        keys = [prompt.key for prompt in self._prompts if not prompt.is_ended]
        if keys:
            self._close(*keys)

    def _note(self, place: int) -> None:
        self._ready.append(place)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
