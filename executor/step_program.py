"""The kernels of a step of one shape, in order: what a graph captures or what is launched singly.

upload ──> table growth, inputs ──> network ──> logits │ edits, sampling, write-back ──> tokens
           └──────────────── forward ────────────────┘ └──────────── sample ───────────┘
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.executor.device_rows import DeviceRows
from octavo.executor.ops.edit_logits import edit_logits
from octavo.executor.ops.prepare_inputs import DeviceBatch, prepare_inputs
from octavo.executor.ops.sample import SampledRows, SampleWorkspace, sample
from octavo.executor.ops.write_rows import write_rows
from octavo.models.causal_lm import CausalLM

COLUMN_WORDS = 4  # rows, num_tokens, num_computed_tokens, sample
RANGE_WORDS = 4  # row, column, start, length


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides which kernels run with which grids."""

    num_rows: int
    num_tokens: int
    num_sampled: int
    max_row_tokens: int
    num_ranges: int
    wants_all: bool = False
    """Hidden states of all tokens are wanted, not only of those behind which one is sampled."""

    @classmethod
    def padded(cls, num_rows: int, num_tokens: int) -> "StepShape":
        """Return the shape that has room for any step of as many rows and tokens.

        All its rows sample. With as many tokens as rows, each row computes one: it decodes.
        """
        return cls(num_rows, num_tokens, num_rows, num_tokens - num_rows + 1, num_rows)

    @property
    def is_decode(self) -> bool:
        """True when behind each token one is sampled."""
        return self.num_sampled == self.num_tokens

    def count_padding(self, larger: "StepShape") -> int:
        """Return the rows or tokens, whichever are more, that fill up a larger shape."""
        return max(larger.num_rows - self.num_rows, larger.num_tokens - self.num_tokens)

    @property
    def ranges_start(self) -> int:
        """Where the ranges of table growth begin in the upload."""
        return COLUMN_WORDS * self.num_rows

    @property
    def values_start(self) -> int:
        """Where the appended block ids begin in the upload."""
        return self.ranges_start + RANGE_WORDS * self.num_ranges


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All that lives on the device from step to step; shared by the programs of all shapes."""

    model: CausalLM
    backend: AttentionBackend
    rows: DeviceRows
    upload: Tensor  # (capacity,) int32: the step's columns, ranges and values
    workspace: SampleWorkspace
    block_size: int


class StepProgram:
    """Launches a step on fixed inputs; allocates nothing but activations."""

    def __init__(self, state: DeviceState, shape: StepShape, batch: DeviceBatch) -> None:
        self.shape = shape
        self.batch = batch
        self.hidden: Tensor | None = None  # (num_tokens or num_sampled, hidden_size), after forward
        self.logits: Tensor | None = None  # (num_sampled, vocab_size), after forward
        self._state = state

    def forward(self) -> None:
        """Compute hidden states and the logits of the rows that sample."""
        state, shape = self._state, self.shape
        columns = state.upload[: shape.ranges_start].view(COLUMN_WORDS, shape.num_rows)
        ranges = state.upload[shape.ranges_start : shape.values_start].view(-1, RANGE_WORDS)
        write_rows(state.rows.block_tables, ranges, state.upload)
        prepare_inputs(
            columns,
            token_ids=state.rows.token_ids,
            block_tables=state.rows.block_tables,
            block_size=state.block_size,
            out=self.batch,
            max_row_tokens=shape.max_row_tokens,
        )
        attention = state.backend.bind(self.batch.attention)
        sampled = self.batch.sampled_tokens[: max(1, shape.num_sampled)]
        wanted = None if shape.is_decode or shape.wants_all else sampled
        hidden = self.hidden = state.model(self.batch.input_ids, attention, wanted)
        if shape.num_sampled == 0:
            return
        if shape.wants_all:
            hidden = hidden.index_select(0, sampled)
        self.logits = state.model.compute_logits(hidden)

    def sample(self, edited: Tensor | None) -> None:
        """Sample from the logits into the workspace and the rows; edits need scratch."""
        if self.shape.num_sampled == 0:
            return
        state, logits = self._state, self.logits
        assert logits is not None, "sample before forward"
        rows = SampledRows(
            rows=self.batch.sampled_rows[: len(logits)],
            positions=self.batch.sampled_positions[: len(logits)],
            parameters=state.rows.parameters,
            history=state.rows.token_ids,
        )
        if edited is not None:
            edited = edited[: len(logits)]
            edit_logits(logits, rows, edited=edited)
        sample(logits, rows, workspace=state.workspace, edited=edited)


class Programs:
    """Makes the programs of one runner without knowing it, so that no cycle keeps its memory."""

    def __init__(self, state: DeviceState, num_rows: int) -> None:
        self._state = state
        self._decode_batch = self._create_batch(num_rows, num_rows)

    def create(self, shape: StepShape) -> StepProgram:
        """Return a program with inputs of its own."""
        batch = self._create_batch(shape.num_rows, shape.num_tokens)
        return StepProgram(self._state, shape, batch)

    def create_kept(self, shape: StepShape) -> StepProgram:
        """Return a program for many steps; all those of decode steps share their inputs."""
        if not shape.is_decode:
            return self.create(shape)
        return StepProgram(self._state, shape, slice_batch(self._decode_batch, shape.num_rows))

    def _create_batch(self, num_rows: int, num_tokens: int) -> DeviceBatch:
        return DeviceBatch.create(
            num_rows,
            num_tokens,
            max_num_blocks=self._state.rows.block_tables.shape[1],
            device=self._state.upload.device,
        )


def slice_batch(batch: DeviceBatch, num_rows: int) -> DeviceBatch:
    """Return the first rows of a batch of one-token rows: the same memory, for a smaller step."""
    attention = batch.attention
    return DeviceBatch(
        input_ids=batch.input_ids[:num_rows],
        attention=replace(
            attention,
            query_start=attention.query_start[: num_rows + 1],
            context_lengths=attention.context_lengths[:num_rows],
            block_tables=attention.block_tables[:num_rows],
            positions=attention.positions[:num_rows],
            slot_mapping=attention.slot_mapping[:num_rows],
        ),
        sampled_rows=batch.sampled_rows[:num_rows],
        sampled_tokens=batch.sampled_tokens[:num_rows],
        sampled_positions=batch.sampled_positions[:num_rows],
    )


def create_workspace(max_rows: int, device: torch.device) -> tuple[SampleWorkspace, Tensor]:
    """Return a workspace whose results lie side by side, and these results: one read-back."""
    results = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
    workspace = SampleWorkspace.create(max_rows, device)
    return replace(workspace, token_ids=results[0], faults=results[1]), results
