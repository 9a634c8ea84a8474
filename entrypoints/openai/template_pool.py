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
        async with self._turn(), self._process() as process:
            reply = await _ask(process, packed)
        if isinstance(reply, Refused):
            raise InvalidRequestError(
                reply.message, parameter=reply.parameter, reason_code=reply.reason_code
            )
        return reply.text

    async def warm_up(self) -> None:
        """Start the first process before it is needed."""
        async with self._turn(), self._process():
            pass

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

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        """Lend a process; one that has not answered is ended."""
        process = self._idle.pop() if self._idle else await self._start()
        is_free = False
        try:
            yield process
            is_free = True
        except EOFError:
            status = await process.wait()
            raise self._describe_end(status) from None
        finally:
            if is_free:
                self._idle.append(process)
            else:
                await self._end(process)

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


async def _ask(process: Process, packed: bytes) -> Reply:
    """Let a process answer.

    Raises:
        EOFError: it has ended before it did.
    """
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(LENGTH.pack(len(packed)))
        process.stdin.write(packed)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        answer = await process.stdout.readexactly(length)
    except ConnectionError as error:
        raise EOFError("the pipe is closed") from error
    return msgspec.msgpack.decode(answer, type=Reply)
