"""API process: what the core was asked to tell or to do, and the answers on their way."""

import asyncio
from collections.abc import Callable
from itertools import count

from octavo.engine.messages import CoreMessage, Done, Explanation
from octavo.errors import EngineDeadError

CoreAnswer = Explanation | Done

ANSWER_TIMEOUT_S = 10.0
"""The core answers with its next step. One that stands still says nothing."""


class Questions:
    """Owns the questions without an answer; each is asked on the event loop, and waits there."""

    def __init__(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._tickets = count()
        self._open: dict[int, asyncio.Future[CoreAnswer]] = {}

    async def ask(
        self, create: Callable[[int], CoreMessage], send: Callable[[CoreMessage], None]
    ) -> CoreAnswer:
        """Send the message that ``create`` makes with a ticket, and return its answer.

        Raises:
            TimeoutError: no answer came in time.
            EngineDeadError: the core has died meanwhile.
        """
        ticket = next(self._tickets)
        answer: asyncio.Future[CoreAnswer] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answer
        try:
            send(create(ticket))
            return await asyncio.wait_for(answer, self._timeout_s)
        finally:
            del self._open[ticket]

    def answer(self, answer: CoreAnswer) -> None:
        """Hand an answer to whoever asked, if they still wait."""
        question = self._open.get(answer.ticket)
        if question is not None and not question.done():
            question.set_result(answer)

    def fail(self, reason: str) -> None:
        """Tell all who wait that no answer will come."""
        for question in self._open.values():
            if not question.done():
                question.set_exception(EngineDeadError(reason))
