"""No process of its own: feeds a journal to a fresh scheduler, which must decide the same."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.block_manager.hashing import KeyChain
from octavo.config import SchedulerConfig
from octavo.engine.journal import Record
from octavo.engine.messages import AddRequest, pack_ids
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.errors import OctavoError
from octavo.executor.step import RowSampling, StepResult

EOS = 1
OTHER = 0


class ReplayDivergedError(OctavoError):
    """A scheduler decided otherwise than the journal says: the journal or the code has changed."""


def read_journal(path: Path) -> Iterator[Record]:
    """Yield the records of a journal file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield tuple(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                raise ReplayDivergedError(f"{path} is cut or damaged in line {number}") from error


def replay(records: Iterable[Record]) -> int:
    """Take every recorded input and compare every decision; returns the number of records.

    Raises:
        ReplayDivergedError: at the first record that comes out otherwise.
    """
    remaining = iter(records)
    kind, fields = next(remaining)
    if kind != "config":
        raise ReplayDivergedError(f"a journal begins with its config, this one with {kind!r}")
    replayer = Replayer(SchedulerConfig(**fields))
    num_records = 1
    for record in remaining:
        made = replayer.feed(record)
        if _normalise(made) != _normalise(record):
            raise ReplayDivergedError(
                f"record {num_records} says {record!r}, the scheduler says {made!r}"
            )
        num_records += 1
    return num_records


class Replayer:
    """A scheduler whose results come from a journal. Token ids are dummies, keys are recorded."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self._chains: dict[int, RecordedKeyChain] = {}

    def feed(self, record: Record) -> Record:
        """Apply one record's input; returns the record that the scheduler makes of it."""
        kind, *fields = record
        match kind:
            case "add":
                self._add(fields)
            case "abort":
                self.scheduler.abort([fields[0]])
            case "expire":
                self.scheduler.expire([fields[0]], "")
            case "finish":
                self.scheduler.finish(fields[0], stop_reason="", num_output_tokens=0)
            case "reset":
                self.scheduler.reset_prefix_cache()
            case "plan":
                self.scheduler.plan(0.0)
            case "fail":
                self.scheduler.fail_step("")
            case "update":
                self._update(fields)
            case _:
                raise ReplayDivergedError(f"{kind!r} is no kind of record")
        return self.scheduler.journal.records[-1]

    def _add(self, fields: list[Any]) -> None:
        number, num_prompt_tokens, max_tokens, priority, keys, skips_cache = fields
        message = AddRequest(
            number=number,
            request_id="",
            prompt=pack_ids([OTHER] * num_prompt_tokens),
            sampling=RowSampling(seed=0),
            max_tokens=max_tokens,
            arrival_s=0.0,
            priority=priority,
            eos_ids=(EOS,),
            skip_reading_prefix_cache=skips_cache,
        )
        chain = RecordedKeyChain(self.scheduler.config.block_size, keys)
        self._chains[number] = chain
        self.scheduler.add(Request(message), chain)

    def _update(self, fields: list[Any]) -> None:
        step_id, stopped, failed, keys = fields if len(fields) > 1 else (fields[0], [], [], [])
        for number, key in keys:
            self._chains[number].next_keys.append(bytes.fromhex(key))
        launched = self.scheduler.oldest_launched
        numbers = [request.number for request in launched.requests]
        sampled = [numbers[index] for index in launched.step.sample.nonzero()[0]]
        token_ids = [EOS if number in stopped else OTHER for number in sampled]
        errors = {index: "" for index, number in enumerate(numbers) if number in failed}
        self.scheduler.update(
            StepResult(step_id, np.array(token_ids, dtype=np.int32), row_errors=errors)
        )


class RecordedKeyChain(KeyChain):
    """A chain whose keys were computed when the journal was written."""

    __slots__ = ("next_keys",)

    def __init__(self, block_size: int, keys: list[str]) -> None:
        super().__init__(bytes.fromhex(keys[0]), block_size)
        self.keys = [bytes.fromhex(key) for key in keys]
        self.next_keys: list[bytes] = []

    def extend(self, token_ids: object) -> None:
        """Add the recorded key of the block that has become full."""
        self.keys.append(self.next_keys.pop(0))


def _normalise(record: Record) -> Any:
    return msgspec.json.decode(msgspec.json.encode(record))
