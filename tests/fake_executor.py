"""An executor without a model: deterministic tokens, a K/V pool that knows what each slot holds.

Every broken promise of a Step is an AssertionError raised by ``submit`` or ``result``.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.executor.step import (
    ExecutorInfo,
    NewRow,
    PositionLogprobs,
    RowSampling,
    Step,
    StepResult,
)

NUM_RESERVED_IDS = 8
"""Ids below this come from ``special_token`` alone: tests take their EOS and stop ids from here."""
EMPTY_PREFIX = 0x9E3779B97F4A7C15

SpecialToken = Callable[[int], int | None]


def every_nth(n: int, token_id: int) -> SpecialToken:
    """Produce ``token_id`` after about one of ``n`` histories."""
    return lambda value: token_id if value % n == 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What goes wrong on demand."""

    submit: Container[int] = ()
    """Ids of steps whose ``submit`` raises RuntimeError, with rows, blocks and copies applied."""
    result: Container[int] = ()
    """Ids of steps whose ``result`` raises RuntimeError."""
    non_finite: Mapping[int, int] = field(default_factory=dict)
    """Request number -> number of tokens, prompt included, after which its logits are NaN."""


NO_FAULTS = Faults()


class FakeExecutor:
    """Stands for a device.

    The next token is a hash of all token ids so far (and of the seed where temperature > 0), so it
    cannot depend on scheduling. After the stores of every step the whole context of every row must
    be in its blocks: a wrong table, a wrongly shared block or a block used after it was freed fails
    there. ``lag`` is how many results may be unread when the next step is submitted.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        lag: int = 0,
        *,
        num_rows: int = 64,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        special_token: SpecialToken = lambda value: None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks,
            block_size,
            num_rows,
            vocab_size,
            max_model_len,
            cache_namespace=b"fake",
            dtype="float32",
            attention_backend="fake",
        )
        self.lag = lag
        self.steps: list[Step] = []
        self.rows: dict[int, FakeRow] = {}
        self.num_results = 0
        self._special_token = special_token
        self._faults = faults
        self._stored = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._histories: dict[int, FakeHistory] = {}
        self._unread: deque[FakeHandle] = deque()
        self._is_shut_down = False

    def submit(self, step: Step) -> "FakeHandle":
        """Check and run one step; its ids stay hidden until the handle's ``result``."""
        assert not self._is_shut_down, "submit after shutdown"
        assert len(self._unread) <= self.lag, (
            f"step {step.step_id}: {len(self._unread)} results are unread, lag is {self.lag}"
        )
        self._check_columns(step)
        self.steps.append(step)
        self._apply_rows(step)
        if step.step_id in self._faults.submit:
            raise RuntimeError(f"submit of step {step.step_id} fails on demand")
        self._store(step)
        self._check_contexts(step)
        handle = FakeHandle(self, step, self._sample(step))
        self._unread.append(handle)
        return handle

    def prepare(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Refuse further steps."""
        self._is_shut_down = True

    def expected_tokens(
        self, prompt: Sequence[int], num_tokens: int, sampling: RowSampling | None = None
    ) -> list[int]:
        """Return the first output tokens of a request that runs alone, special ids included."""
        row = FakeRow(FakeHistory(prompt), [], 0, sampling or RowSampling(seed=0))
        return [self._next_token(row) for _ in range(num_tokens)]

    def read(self, handle: "FakeHandle") -> StepResult:
        """Reveal the tokens of the oldest unread step."""
        assert handle in self._unread, f"result of step {handle.step.step_id} asked twice"
        assert handle is self._unread[0], "results must be asked in the order of submission"
        self._unread.popleft()
        self.num_results += 1
        if handle.step.step_id in self._faults.result:
            raise RuntimeError(f"result of step {handle.step.step_id} fails on demand")
        for history in handle.sampled:
            history.num_revealed += 1
        return handle.outcome

    def _check_columns(self, step: Step) -> None:
        columns = (step.rows, step.num_tokens, step.num_computed_tokens, step.sample)
        assert len({len(column) for column in columns}) == 1, "columns of different lengths"
        assert all(column.dtype == np.int32 for column in columns[:3]), "columns must be int32"
        assert step.sample.dtype == np.bool_, "sample must be bool"
        assert len(set(step.rows.tolist())) == len(step.rows), "a row is scheduled twice"
        parts = (step.rows, step.released_rows, step.new_rows, step.copies, step.new_blocks)
        assert any(len(part) for part in parts), f"step {step.step_id} is empty"
        assert not self.steps or step.step_id > self.steps[-1].step_id, "step ids must grow"

    def _apply_rows(self, step: Step) -> None:
        for row in step.released_rows:
            assert row in self.rows, f"row {row} is released but nobody has it"
            del self.rows[row]
        for new in step.new_rows:
            self._write_row(new)
        for copy in step.copies:
            self._check_blocks((copy.source, copy.target))
            self._slots(copy.target)[:] = self._slots(copy.source)
        for growth in step.new_blocks:
            assert growth.row in self.rows, f"row {growth.row} grows but nobody has it"
            self.rows[growth.row].block_ids.extend(growth.block_ids)
            self._check_blocks(self.rows[growth.row].block_ids)

    def _write_row(self, new: NewRow) -> None:
        assert 0 <= new.row < self.info.num_rows, f"row {new.row} does not exist"
        assert new.row not in self.rows, f"row {new.row} is taken by two requests"
        assert new.token_ids.dtype == np.int32, "token ids must be int32"
        assert 0 <= new.num_computed_tokens < len(new.token_ids), "nothing is left to compute"
        self._check_blocks(new.block_ids)
        history = self._histories.get(new.number)
        if history is None:
            assert new.num_prompt_tokens == len(new.token_ids), "a first admission is the prompt"
            reads_cache = new.sampling.num_prompt_logprobs is None
            assert reads_cache or new.num_computed_tokens == 0, "cached tokens have no logits"
            history = self._histories[new.number] = FakeHistory(new.token_ids.tolist())
        else:
            self._check_readmission(new, history)
        self.rows[new.row] = FakeRow(
            history,
            list(new.block_ids),
            new.num_computed_tokens,
            new.sampling,
            self._faults.non_finite.get(new.number),
            has_outputs=new.sampling.num_prompt_logprobs is None,
        )

    def _check_readmission(self, new: NewRow, history: "FakeHistory") -> None:
        assert all(row.history is not history for row in self.rows.values()), (
            f"request {new.number} has two rows"
        )
        assert new.num_prompt_tokens == history.num_prompt_tokens, "the prompt changed its length"
        num_known = history.num_prompt_tokens + history.num_revealed
        assert len(new.token_ids) <= num_known, "a plan holds ids that the host cannot know"
        assert num_known == history.num_tokens, "readmitted before its last result was read"
        assert new.token_ids.tolist() == history.token_ids, "readmitted with other token ids"

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        assert len(set(block_ids)) == len(block_ids), f"a block twice in {block_ids}"
        for block_id in block_ids:
            assert 0 <= block_id < self.info.num_blocks, f"block {block_id} does not exist"

    def _slots(self, block_id: int) -> NDArray[np.uint64]:
        size = self.info.block_size
        return self._stored[block_id * size : (block_id + 1) * size]

    def _store(self, step: Step) -> None:
        written: set[int] = set()
        for index, row_id in enumerate(step.rows.tolist()):
            assert row_id in self.rows, f"row {row_id} is scheduled but nobody has it"
            row = self.rows[row_id]
            start, count = int(step.num_computed_tokens[index]), int(step.num_tokens[index])
            end = start + count
            assert count >= 1, f"row {row_id} is scheduled for {count} tokens"
            assert start == row.num_computed_tokens, (
                f"row {row_id} has {row.num_computed_tokens} computed tokens, the step says {start}"
            )
            assert end <= row.history.num_tokens, f"row {row_id} has no token {end - 1} yet"
            closes = end == row.history.num_tokens
            is_scored = closes and end == row.history.num_prompt_tokens and not row.has_outputs
            assert bool(step.sample[index]) == closes or is_scored, (
                f"row {row_id}: sample must be {closes}"
            )
            slots = self._find_slots(row, end)[start:]
            assert written.isdisjoint(slots.tolist()), f"row {row_id} writes another row's slots"
            written.update(slots.tolist())
            self._stored[slots] = row.history.prefixes[start:end]
            row.num_computed_tokens = end

    def _find_slots(self, row: "FakeRow", num_tokens: int) -> NDArray[np.int64]:
        size = self.info.block_size
        assert len(row.block_ids) * size >= num_tokens, (
            f"{num_tokens} tokens do not fit into {len(row.block_ids)} blocks of {size}"
        )
        positions = np.arange(num_tokens)
        return np.asarray(row.block_ids)[positions // size] * size + positions % size

    def _check_contexts(self, step: Step) -> None:
        """Check all live rows, scheduled or not: a fault shows in the step that makes it."""
        for row_id, row in self.rows.items():
            end = row.num_computed_tokens
            found = self._stored[self._find_slots(row, end)]
            wrong = np.flatnonzero(found != np.array(row.history.prefixes[:end], dtype=np.uint64))
            assert not len(wrong), (
                f"step {step.step_id}, row {row_id}: the K/V of position {wrong[0]} of {end} "
                f"is not in block {row.block_ids[wrong[0] // self.info.block_size]}"
            )

    def _sample(self, step: Step) -> tuple[StepResult, list["FakeHistory"]]:
        result = StepResult(step.step_id, np.zeros(step.num_sampled, dtype=np.int32))
        sampled: list[FakeHistory] = []
        for index, row_id in enumerate(step.rows.tolist()):
            row = self.rows[row_id]
            if row.sampling.num_prompt_logprobs is not None:
                result.prompt_logprobs[index] = _prompt_logprobs(row, int(step.num_tokens[index]))
            if not step.sample[index]:
                continue
            if row.history.num_tokens == row.non_finite_at:
                result.row_errors[index] = "non-finite logits"
            token_id = self._next_token(row)
            if row.sampling.num_logprobs is not None:
                result.logprobs[len(sampled)] = _dummy_logprobs(token_id, rank=1)
            result.token_ids[len(sampled)] = token_id
            sampled.append(row.history)
        return result, sampled

    def _next_token(self, row: "FakeRow") -> int:
        """Choose the row's next token and append it."""
        history, sampling = row.history, row.sampling
        noise = sampling.seed if sampling.temperature > 0 else 0
        value = _mix(history.prefixes[-1], noise)
        token_id = self._special_token(value)
        num_outputs = history.num_tokens - history.num_prompt_tokens
        is_held_back = num_outputs < sampling.min_tokens and token_id in sampling.held_back_ids
        if token_id is None or is_held_back:
            token_id = NUM_RESERVED_IDS + value % (self.info.vocab_size - NUM_RESERVED_IDS)
        history.append(token_id)
        return token_id


class FakeHistory:
    """All token ids of one request, whichever rows it has had.

    ``prefixes[p]`` is a hash of the ids at positions 0..p: what the K/V of position p depends on.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self.prefixes: list[int] = []
        self.num_prompt_tokens = len(prompt)
        self.num_revealed = 0
        for token_id in prompt:
            self.append(token_id)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        parent = self.prefixes[-1] if self.prefixes else EMPTY_PREFIX
        self.token_ids.append(token_id)
        self.prefixes.append(_mix(parent, token_id))


@dataclass(slots=True)
class FakeRow:
    history: FakeHistory
    block_ids: list[int]
    num_computed_tokens: int
    sampling: RowSampling
    non_finite_at: int | None = None
    has_outputs: bool = True
    """False where the row may be there for its prompt's log-probabilities alone."""


@dataclass(eq=False, slots=True)
class FakeHandle:
    executor: FakeExecutor
    step: Step
    launched: tuple[StepResult, list[FakeHistory]] = field(repr=False)

    @property
    def outcome(self) -> StepResult:
        return self.launched[0]

    @property
    def sampled(self) -> list[FakeHistory]:
        return self.launched[1]

    def result(self) -> StepResult:
        return self.executor.read(self)


def _mix(value: int, item: int) -> int:
    """Hash (value, item) to 64 bits by splitmix64's finaliser; never 0, which is an empty slot."""
    mixed = (value * 0xD1342543DE82EF95 + item + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) or 1


def _dummy_logprobs(token_id: int, rank: int) -> PositionLogprobs:
    return PositionLogprobs(
        np.array([token_id], dtype=np.int32), np.array([-float(rank)], dtype=np.float32), rank
    )


def _prompt_logprobs(row: FakeRow, num_tokens: int) -> list[PositionLogprobs]:
    """Make dummies that can be told apart: the rank is the position of the entry's prompt token."""
    end = row.num_computed_tokens
    last = min(end, row.history.num_prompt_tokens - 1)
    return [
        _dummy_logprobs(row.history.token_ids[p + 1], rank=p + 1)
        for p in range(end - num_tokens, last)
    ]
