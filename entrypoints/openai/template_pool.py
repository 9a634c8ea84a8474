"""Renders conversations in a few processes, each of which can be lost.

Nothing in this process bounds a template: a thread cannot be ended, and a sandbox counts neither
time nor memory (docs/decisions/0005-templates-in-processes.md).
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from octavo.engine.template_process import LENGTH, Refused, Reply
from octavo.engine.template_renderer import RenderJob, refuse_cost
from octavo.entrypoints.http.errors import HttpError
from octavo.errors import InvalidRequestError

logger = logging.getLogger(__name__)

NUM_PROCESSES = 4
"""Started when they are needed; a conversation waits for the others only if all are busy."""
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 2**30
MODULE = "octavo.engine.template_process"


class TemplatePool:
    """Owns the processes; belongs to one event loop."""

    def __init__(
        self, *, num_processes: int = NUM_PROCESSES, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self._time_limit_s = time_limit_s
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    @property
    def pids(self) -> set[int]:
        """The ids of the processes."""
        return {process.pid for process in self._all}

    async def render(self, job: RenderJob) -> str:
        """Return the text of a conversation.

        Raises:
            InvalidRequestError: the template refuses the messages, or they cost too much.
            HttpError: every process is busy with conversations that cost too much (503).
        """
        packed = _pack(job)
        async with self._turn():
            reply = await self._ask_idle(packed)
            if reply is None:
                reply = await self._ask(await self._start(), packed)
        if isinstance(reply, int):
            raise self._describe_end(reply)
        if isinstance(reply, Refused):
            raise InvalidRequestError(
                reply.message, parameter=reply.parameter, reason_code=reply.reason_code
            )
        return reply.text

    async def warm_up(self) -> None:
        """Start the first process before it is needed."""
        async with self._turn():
            self._idle.append(await self._start())

    async def shutdown(self) -> None:
        """End the processes, whatever they are doing."""
        for process in list(self._all):
            await self._end(process)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(2 * self._time_limit_s):
                await self._turns.acquire()
        except TimeoutError:
            raise HttpError(503, "too many chat templates are being rendered") from None
        try:
            yield
        finally:
            self._turns.release()

    async def _ask_idle(self, packed: bytes) -> Reply | int | None:
        """Let a process answer that has nothing to do; None if there is none.

        None also if it ends, unless its time is over: it may have been killed before it was asked.
        """
        if not self._idle:
            return None
        reply = await self._ask(self._idle.pop(), packed)
        return None if isinstance(reply, int) and reply != -signal.SIGALRM else reply

    async def _ask(self, process: Process, packed: bytes) -> Reply | int:
        """Let a process answer; if it ends instead, return the status with which it has."""
        is_free = False
        try:
            reply = await _exchange(process, packed)
            is_free = True
        except EOFError:
            return await process.wait()
        finally:
            if is_free:
                self._idle.append(process)
            else:
                await self._end(process)
        return reply

    async def _start(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE),
                *(str(self._time_limit_s), str(MEMORY_LIMIT_BYTES)),
                stdin=PIPE,
                stdout=PIPE,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},  # and nothing that is secret
                start_new_session=True,  # Ctrl-C is for the server
            )
        except OSError as error:  # of memory, files or processes
            logger.error("no process for chat templates can be started: %s", error)
            raise HttpError(503, "the server has no room to render a chat template") from error
        self._all.add(process)
        return process

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _describe_end(self, status: int) -> Exception:
        """Return what the end of a process means: a signal was the template's fault."""
        if status == -signal.SIGALRM:
            return refuse_cost(f"it has not ended after {self._time_limit_s:g} s")
        if status < 0:
            return refuse_cost(f"its process ended with status {status}")
        return RuntimeError(f"a process for chat templates ended with status {status}")


def _pack(job: RenderJob) -> bytes:
    try:
        return msgspec.msgpack.encode(job)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the conversation cannot be given to a template: {error}", parameter="messages"
        ) from error


async def _exchange(process: Process, packed: bytes) -> Reply:
    """Send a process a conversation and return its answer.

    Raises:
        EOFError: it has ended before it did.
    """
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    if process.returncode is not None or process.stdin.is_closing():
        raise EOFError("the process has ended")
    try:
        process.stdin.write(LENGTH.pack(len(packed)))
        process.stdin.write(packed)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        answer = await process.stdout.readexactly(length)
    except ConnectionError as error:
        raise EOFError("the pipe is closed") from error
    return msgspec.msgpack.decode(answer, type=Reply)
