"""One call's requests, run to their ends on a synchronous engine."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tqdm import tqdm

from octavo.engine.llm_engine import LLMEngine
from octavo.engine.prompt import Prompt
from octavo.entrypoints.interrupts import DeferredInterrupts
from octavo.errors import BatchRefusedError, InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

_batch_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One request; ``prompt`` is the error if there already was one in making it."""

    prompt: Prompt | InvalidRequestError
    params: SamplingParams
    priority: int = 0


def run_batch(
    engine: LLMEngine, requests: Sequence[BatchRequest], *, show_progress: bool
) -> list[RequestOutput]:
    """Run requests together and return their final outputs in order.

    However it ends, none of them is left in the engine.

    Raises:
        InvalidRequestError: the only request was refused; nothing has run.
        BatchRefusedError: requests were refused; the others have run, and it has their outputs.
        EngineDeadError: the engine has died.
        KeyboardInterrupt: between two steps.
    """
    batch = _Batch(engine, requests)
    with DeferredInterrupts() as interrupts:
        try:
            batch.submit()
            with _Progress(batch.num_accepted, is_shown=show_progress) as progress:
                while engine.has_unfinished_requests():
                    interrupts.check()
                    finished = batch.step()
                    batch.submit()
                    progress.add(finished, num_requests=batch.num_accepted)
        finally:
            batch.abort()
    return batch.collect()


class _Batch:
    """Owns which requests are open, which were refused, and the outputs of the others."""

    def __init__(self, engine: LLMEngine, requests: Sequence[BatchRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._arrival_s = engine.now_s
        self._submitted = 0
        self._name = f"batch-{next(_batch_numbers)}"
        self._open: dict[str, int] = {}  # request_id -> position in the call
        self._refusals: dict[int, InvalidRequestError] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(requests)

    @property
    def num_accepted(self) -> int:
        """How many requests have not been refused."""
        return len(self._requests) - len(self._refusals)

    def submit(self) -> None:
        """Check and queue the requests that the next step may want; nothing is computed yet."""
        while self._submitted < len(self._requests) and self._engine.wants_requests:
            self._submit_one(self._submitted)
            self._submitted += 1

    def step(self) -> list[RequestOutput]:
        """Compute until there is something to report; return the outputs that became final."""
        finished = [output for output in self._engine.step() if output.finished]
        for output in finished:
            self._outputs[self._open.pop(output.request_id)] = output
        return finished

    def abort(self) -> None:
        """End what is open and let the core release it."""
        if not self._open:
            return
        self._engine.abort_request(self._open)
        self._open.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def collect(self) -> list[RequestOutput]:
        """Return all outputs, or say what was refused."""
        if not self._refusals:
            return [output for output in self._outputs if output is not None]
        if len(self._requests) == 1:
            raise self._refusals[0]
        reasons = "; ".join(f"prompt {index}: {error}" for index, error in self._refusals.items())
        raise BatchRefusedError(
            f"{len(self._refusals)} of {len(self._requests)} prompts were refused: {reasons}",
            outputs=self._outputs,
        )

    def _submit_one(self, index: int) -> None:
        request = self._requests[index]
        request_id = f"{self._name}-{index}"
        try:
            if isinstance(request.prompt, InvalidRequestError):
                raise request.prompt
            self._engine.add_request(
                request_id,
                request.prompt,
                request.params,
                priority=request.priority,
                arrival_s=self._arrival_s,
            )
        except InvalidRequestError as error:
            self._refusals[index] = error
        else:
            self._open[request_id] = index


class _Progress:
    """A bar on stderr: finished requests, and tokens per second."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        self._bar = tqdm(
            total=num_requests,
            desc="Requests",
            unit="request",
            disable=not is_shown or num_requests == 0,
            dynamic_ncols=True,
        )
        self._start_s = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def add(self, outputs: Sequence[RequestOutput], *, num_requests: int) -> None:
        """Count outputs that became final, of so many requests."""
        self._bar.total = num_requests
        if not outputs or self._bar.disable:
            return
        for output in outputs:
            self._num_prompt_tokens += len(output.prompt_token_ids)
            self._num_output_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        passed_s = max(time.monotonic() - self._start_s, 1e-9)
        self._bar.set_postfix_str(
            f"{self._num_prompt_tokens / passed_s:.0f} prompt tok/s,"
            f" {self._num_output_tokens / passed_s:.0f} output tok/s",
            refresh=False,
        )
        self._bar.update(len(outputs))
