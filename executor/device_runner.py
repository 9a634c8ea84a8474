"""Runs Steps on a CUDA device: uploads, kernels and read-backs in the order of submission.

Rows live on the device. A step that fits one of some shapes, as all do in which every row decodes,
is one upload, two graphs and one read-back; others, as all that want log-probabilities of a prompt,
launch the same kernels singly. The host never waits for the device, except for a staging slot that
is still being copied and for results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.ops.dependent_launch import MAX_ROWS
from octavo.executor.compile_ahead import StartCompiler
from octavo.executor.device_logprobs import LogprobReadback, PromptLogprobReadback
from octavo.executor.device_rows import DeviceRows
from octavo.executor.graphs import EAGER_SIZES, EditScratch, StepGraphs
from octavo.executor.logprobs import MAX_LOGIT_ROWS, PromptSpan, find_prompt_spans
from octavo.executor.ops.choose import EXHAUSTED as EXHAUSTED_CODE
from octavo.executor.ops.logprobs import VARIED_TOPS, compute_logprobs
from octavo.executor.ops.sample import VARIED_BATCHES
from octavo.executor.row_uploads import RowUploads
from octavo.executor.sampler import NON_FINITE
from octavo.executor.staging import Readback, ReadbackRing, UploadRing
from octavo.executor.step import (
    EXHAUSTED,
    ExecutorInfo,
    Int32Array,
    NewRow,
    RowSampling,
    Step,
    StepResult,
)
from octavo.executor.step_program import (
    DeviceState,
    Programs,
    StepProgram,
    StepShape,
    create_workspace,
)
from octavo.executor.step_uploads import StepUploads
from octavo.executor.streams import create_stream, launching_on
from octavo.models.causal_lm import CausalLM
from octavo.models.ops import linear_converted, linear_hopper

MIN_UPLOAD_WORDS = 2**20
FEW_TOKENS = sorted({*linear_hopper.PADDED_ROWS, *linear_converted.PADDED_ROWS, MAX_ROWS})
"""Numbers of tokens up to which products, or the launches of kernels, are others."""
MOST_VARIED_ROWS = 4_096
"""Products of more rows hardly vary: of 68 kernels that torch loaded for the five matrices of
Qwen3-8B on an H200, at numbers of rows to 16,384, six were for more."""


class DeviceRunner:
    """Owns rows, staging rings and graphs; uses the network, and the backend with its KV pool."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        info: ExecutorInfo,
        *,
        device: torch.device,
        graph_shapes: Sequence[StepShape],
    ) -> None:
        self.info = info
        self._device = device
        self._graph_shapes = graph_shapes
        self._stream = create_stream(device)
        capacity = max(MIN_UPLOAD_WORDS, 2 * info.max_model_len + 4 * info.vocab_size)
        self._uploads = UploadRing(capacity, device, self._stream)
        rows = DeviceRows.create(
            info.num_rows,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            device=device,
        )
        self._rows = rows
        self._row_uploads = RowUploads(rows, self._uploads)
        self._requests: dict[int, NewRow] = {}
        self._reporting: set[int] = set()  # rows that want log-probabilities, of any kind
        self._step_uploads = StepUploads(self._uploads, num_rows=info.num_rows)
        workspace, self._results = create_workspace(info.num_rows, device)
        self._readbacks = ReadbackRing(self._results, self._stream)
        self._state = DeviceState(
            model, backend, rows, self._uploads.device_words, workspace, info.block_size
        )
        self._edited = EditScratch(info.num_rows, info.vocab_size, device)
        self._programs = Programs(self._state, info.num_rows)
        self.graphs = StepGraphs(graph_shapes, self._programs.create_kept, edited=self._edited)

    def compile(self, compiler: StartCompiler, *, num_tokens: int) -> None:
        """Compile the kernels of steps of all kinds side by side; nothing is computed.

        Those of large steps come first, for they take longest to compile. Meanwhile torch loads
        its own kernels.
        """
        num_rows = self.info.num_rows
        sizes = [num_rows, *(size for size in VARIED_BATCHES if size < num_rows)]
        shapes = [StepShape.padded(sizes[0], sizes[0]), StepShape.padded(num_rows, num_tokens)]
        shapes += [StepShape.padded(size, size) for size in sizes[1:]]
        shapes += [StepShape.padded(size, 2 * size) for size in sizes]
        shapes += [StepShape.padded(min(size, num_rows), size) for size in FEW_TOKENS]
        with launching_on(self._stream), compiler.compiling_ahead():
            for shape in shapes:
                program = self._programs.create(shape)
                program.batch.input_ids.zero_()  # what torch reads must be an index
                program.batch.sampled_tokens.zero_()
                program.forward()
                program.sample(None)
                program.sample(self._edited.take())
            varied = list_varied_rows(min(num_tokens, MOST_VARIED_ROWS))
            self._state.model.multiply_once(varied, max_logit_rows=num_rows)
            assert program.logits is not None
            for num_top in VARIED_TOPS:
                compute_logprobs(program.logits, self._results[0], num_top=num_top)

    def warm_up(self) -> None:
        """Capture decode steps of the sizes of a few users, one of them with edits.

        Before, steps that our kernels multiply and that torch's do are launched singly: both keep
        memory for each stream, which must not be part of a graph.
        """
        decode = [shape for shape in self._graph_shapes if shape.is_decode]
        with launching_on(self._stream):
            for num_tokens in (2, 2 * linear_hopper.MAX_ROWS):
                shape = StepShape.padded(1, num_tokens)
                self._step_uploads.send_padding(shape)
                self._programs.create(shape).forward()
            for shape in decode:
                if shape.num_rows in EAGER_SIZES:
                    self._step_uploads.send_padding(shape)
                    self.graphs.run(shape, has_edits=False)
            for shape in decode[:1]:
                self._step_uploads.send_padding(shape)
                self.graphs.run(shape, has_edits=True)
        torch.cuda.synchronize(self._device)

    def prepare(self) -> bool:
        """Capture one more shape of step, without a row."""
        shape = self.graphs.find_uncaptured()
        if shape is None:
            return False
        try:
            with launching_on(self._stream):
                self._step_uploads.send_padding(shape)
                self.graphs.run(shape, has_edits=False)
        except torch.OutOfMemoryError:  # nobody asked for this step: nobody may die of it
            self.graphs.give_up(shape)
        return True

    def profile(self, *, num_tokens: int) -> None:
        """Run the largest step without writing anything, for its memory."""
        shape = replace(StepShape.padded(self.info.num_rows, num_tokens), wants_all=True)
        with launching_on(self._stream):
            self._step_uploads.send_padding(shape)
            program = self._programs.create(shape)
            program.forward()
            program.sample(self._edited.take())
            assert program.hidden is not None
            self._state.model.compute_logits(program.hidden[:MAX_LOGIT_ROWS])  # of a prompt
        torch.cuda.synchronize(self._device)

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Enqueue one step; returns a function that waits for its result."""
        with launching_on(self._stream):
            self._apply(step)
            if not len(step.rows):
                return LaunchedStep(step, None, None, {}).wait
            rows = step.rows.tolist()
            is_reported = not self._reporting.isdisjoint(rows)
            spans = self._find_prompt_spans(step) if is_reported else []
            program = self._run(step, rows, wants_all=bool(spans))
            logprobs = self._find_logprobs(step, program) if is_reported else None
            prompt_logprobs = self._find_prompt_logprobs(spans, program)
            readback = self._readbacks.fetch()
            return LaunchedStep(step, readback, logprobs, prompt_logprobs).wait

    def _apply(self, step: Step) -> None:
        for row in step.released_rows:
            del self._requests[row]
            self._reporting.discard(row)
            self._row_uploads.release(row)
        for new in step.new_rows:
            assert new.row not in self._requests, f"row {new.row} is taken by two requests"
            self._requests[new.row] = new
            if _wants_logprobs(new.sampling):
                self._reporting.add(new.row)
            self._step_uploads.note_row(new)
        self._row_uploads.write(step.new_rows)
        for copy in step.copies:
            self._state.backend.copy_block(copy.source, copy.target)

    def _run(self, step: Step, rows: list[int], *, wants_all: bool) -> StepProgram:
        has_edits = not self._row_uploads.edited.isdisjoint(rows)
        num_tokens = int(step.num_tokens.sum())
        graph_shape = None
        if not wants_all:
            num_sampled = step.num_sampled
            graph_shape = self.graphs.find_shape(len(rows), num_tokens, num_sampled=num_sampled)
        if graph_shape is not None:
            self._step_uploads.send(step, graph_shape)
            return self.graphs.run(graph_shape, has_edits=has_edits)
        shape = StepShape(
            num_rows=len(rows),
            num_tokens=num_tokens,
            num_sampled=step.num_sampled,
            max_row_tokens=int(step.num_tokens.max()),
            num_ranges=len(step.new_blocks),
            wants_all=wants_all,
        )
        self._step_uploads.send(step, shape)
        program = self._programs.create(shape)
        program.forward()
        program.sample(self._edited.take() if has_edits else None)
        return program

    def _find_logprobs(self, step: Step, program: StepProgram) -> LogprobReadback | None:
        sampled_rows = step.rows[step.sample].tolist()
        wanted = {
            index: count
            for index, row in enumerate(sampled_rows)
            if (count := self._requests[row].sampling.num_logprobs) is not None
        }
        if not wanted:
            return None
        assert program.logits is not None
        return LogprobReadback.launch(program.logits, self._results[0], wanted)

    def _find_prompt_spans(self, step: Step) -> list[PromptSpan[Tensor]]:
        def find_wish(row: int) -> tuple[int | None, int]:
            request = self._requests[row]
            return request.sampling.num_prompt_logprobs, request.num_prompt_tokens

        token_ids = self._rows.token_ids
        return list(find_prompt_spans(step, find_wish, lambda row, part: token_ids[row, part]))

    def _find_prompt_logprobs(
        self, spans: Sequence[PromptSpan[Tensor]], program: StepProgram
    ) -> dict[int, PromptLogprobReadback]:
        assert program.hidden is not None
        model, hidden = self._state.model, program.hidden
        return {span.index: PromptLogprobReadback.launch(model, hidden, span) for span in spans}


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device, and its results on their way to the host."""

    step: Step
    readback: Readback | None
    logprobs: LogprobReadback | None
    prompt_logprobs: dict[int, PromptLogprobReadback]

    def wait(self) -> StepResult:
        """Wait for the device and make the result."""
        if self.readback is None:
            return StepResult(self.step.step_id, np.empty(0, dtype=np.int32))
        words = self.readback.wait()  # copied behind everything else of the step
        token_ids, faults = words.reshape(2, -1)[:, : self.step.num_sampled]
        errors = self._read_faults(faults) if np.count_nonzero(faults) else {}
        prompt_logprobs = {}
        for index, pending in self.prompt_logprobs.items():
            if (entries := pending.read()) is None:
                errors[index] = NON_FINITE
            else:
                prompt_logprobs[index] = entries
        return StepResult(
            self.step.step_id,
            token_ids,
            self.logprobs.read() if self.logprobs else {},
            prompt_logprobs,
            errors,
        )

    def _read_faults(self, faults: Int32Array) -> dict[int, str]:
        sampled = np.flatnonzero(self.step.sample)
        return {
            int(sampled[index]): EXHAUSTED if faults[index] == EXHAUSTED_CODE.value else NON_FINITE
            for index in np.flatnonzero(faults)
        }


def list_varied_rows(most: int) -> list[int]:
    """Return numbers of rows for all of which products may be computed by different kernels."""
    found = []
    num_rows = 8
    while num_rows <= most:
        found.append(num_rows)
        num_rows += max(8, num_rows // 24 // 8 * 8)
    return found


def _wants_logprobs(sampling: RowSampling) -> bool:
    return sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
