"""Template process: renders one conversation after the other, and ends if one costs too much.

The kernel's alarm and its limit of memory bound what no sandbox does: a loop without an end, a
power of ten thousand digits, a text of gigabytes. Whoever waits sees the pipe close. Started by
``entrypoints/openai/template_pool``.

usage: python -m octavo.engine.template_process SECONDS BYTES
"""

import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from octavo.engine.template_renderer import RenderJob, render
from octavo.errors import InvalidRequestError

LENGTH = struct.Struct("<I")
"""Stands in front of every message."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The text of a conversation."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is none: an InvalidRequestError."""

    message: str
    parameter: str | None
    reason_code: str


Reply = Rendered | Refused


def main() -> None:
    """Answer jobs until there are no more."""
    time_limit_s, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    _confine(memory_limit_bytes)
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    while job := _read(jobs):
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)  # SIGALRM ends a process, wherever it is
        reply = _answer(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


def _confine(memory_limit_bytes: int) -> None:
    """Take from this process what no template needs: memory without end, files, processes.

    Files can be read, because Python loads some of its modules when they are first used.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(what, (0, 0))


def _read(jobs: BinaryIO) -> bytes:
    head = jobs.read(LENGTH.size)
    return jobs.read(LENGTH.unpack(head)[0]) if head else b""


def _answer(packed: bytes) -> bytes:
    try:
        job = msgspec.msgpack.decode(packed, type=RenderJob)
        return msgspec.msgpack.encode(Rendered(render(job)))
    except InvalidRequestError as error:
        refusal = Refused(error.message, error.parameter, error.reason_code)
    except MemoryError:
        refusal = Refused(
            "the conversation needs too much memory", "messages", "chat_template_too_slow"
        )
    except Exception as error:  # the border to a program of somebody else
        text = f"the chat template fails: {error!r}"
        refusal = Refused(ascii(text), "messages", "chat_template_failed")
    return msgspec.msgpack.encode(refusal)


if __name__ == "__main__":
    main()
