"""Core process: what went into the scheduler and what it decided, one record a step.

Inputs make a run repeatable; decisions are there as a check. Prompts appear as block keys and
lengths, never as text or tokens, and rows that just decode are implied. A ring in memory holds the
newest records; a file keeps them all.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

import msgspec

from octavo.config import SchedulerConfig
from octavo.engine.request import Request

logger = logging.getLogger(__name__)

RING_SIZE = 256
"""Newest records in memory: an add holds a key for each block of its prompt."""

Record = tuple[Any, ...]
"""(kind, ...): config, add, abort, expire, finish, plan, update, fail, reset; see Journal."""


class Journal:
    """Owns the records of one scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        sink: BinaryIO | None = None,
        ring_size: int | None = RING_SIZE,
    ) -> None:
        self.config_record: Record = ("config", asdict(config))
        self.records: deque[Record] = deque(maxlen=ring_size)
        self._sink = sink
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        if sink is not None:
            self._write(self.config_record)

    def add(self, request: Request, keys: Sequence[bytes]) -> None:
        """Record an arrival: number, prompt tokens, max_tokens, priority, keys, whether the cache
        is read.
        """
        message = request.message
        self._append(
            (
                "add",
                request.number,
                request.num_prompt_tokens,
                message.max_tokens,
                message.priority,
                [key.hex() for key in keys],
                message.skip_reading_prefix_cache,
            )
        )

    def abort(self, number: int) -> None:
        """Record an abort from outside."""
        self._append(("abort", number))

    def expire(self, number: int) -> None:
        """Record that a request's time was up."""
        self._append(("expire", number))

    def finish(self, number: int) -> None:
        """Record a finish from outside: a stop string was found."""
        self._append(("finish", number))

    def reset(self) -> None:
        """Record that the prefix cache was dropped."""
        self._append(("reset",))

    def plan(self, decisions: "PlanDecisions") -> None:
        """Record a plan: its step's id and every decision that is not "decode one token"."""
        self._append(decisions.record())

    def update(self, step_id: int, changes: "UpdateChanges") -> None:
        """Record what a result changed besides one more token a row."""
        self._append(changes.record(step_id))

    def fail(self, step_id: int) -> None:
        """Record that a step could not be launched."""
        self._append(("fail", step_id))

    def close(self) -> None:
        """Flush and close the file; the log says so if it lacks records."""
        if self._sink is not None:
            try:
                self._sink.close()
            except OSError as error:
                logger.error("the journal lacks its last records: %s", error)

    def _append(self, record: Record) -> None:
        self.records.append(record)
        if self._sink is not None:
            self._write(record)

    def _write(self, record: Record) -> None:
        assert self._sink is not None
        try:
            self._sink.write(self._encode(record) + b"\n")
        except OSError as error:
            logger.error("the journal ends here: its file cannot be written: %s", error)
            with suppress(OSError):
                self._sink.close()
            self._sink = None


class PlanDecisions:
    """The decisions of one plan, by request number."""

    __slots__ = ("admitted", "chunks", "retracted", "step_id")

    def __init__(self) -> None:
        self.step_id: int | None = None
        self.retracted: list[int] = []
        self.admitted: list[tuple[int, int, int]] = []  # number, cached tokens, scheduled tokens
        self.chunks: list[tuple[int, int]] = []  # number, scheduled tokens other than one

    def record(self) -> Record:
        """Return the record; a step in which all rows decode is just its id."""
        if self.retracted or self.admitted or self.chunks:
            return ("plan", self.step_id, self.retracted, self.admitted, self.chunks)
        return ("plan", self.step_id)


class UpdateChanges:
    """What one result changed, by request number."""

    __slots__ = ("failed", "keys", "stopped")

    def __init__(self) -> None:
        self.stopped: list[int] = []
        self.failed: list[int] = []
        self.keys: list[tuple[int, str]] = []  # number, key of the block that became full

    def record(self, step_id: int) -> Record:
        """Return the record; a result that only added tokens is just its step's id."""
        if self.stopped or self.failed or self.keys:
            return ("update", step_id, self.stopped, self.failed, self.keys)
        return ("update", step_id)
