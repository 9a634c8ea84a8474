"""Core process: collects the decisions of one plan and makes a Step of them."""

from array import array
from collections.abc import Collection, Sequence

import numpy as np

from octavo.engine.launched_step import LaunchedStep
from octavo.engine.request import Request
from octavo.executor.step import NewBlocks, NewRow, Step

ONE = array("i", [1])


class StepBuilder:
    """The columns of one step, filled request by request."""

    def __init__(self, previous: LaunchedStep | None = None) -> None:
        """Begin; ``previous`` is the step that was planned last."""
        self._previous = previous
        self.requests: list[Request] = []
        self._sampling: list[Request] = []
        self._num_tokens = array("i")
        self._sample = bytearray()
        self._new_rows: list[NewRow] = []
        self._new_blocks: dict[int, NewBlocks] = {}

    def schedule(self, request: Request, num_tokens: int) -> int:
        """Compute ``num_tokens`` more tokens of a request and sample one if that closes the gap and
        the request has one to come.

        Writes the request's counts as they will be after the step; returns its computed tokens.
        """
        self.requests.append(request)
        self._num_tokens.append(num_tokens)
        num_computed = request.num_computed_tokens + num_tokens
        request.num_computed_tokens = num_computed
        is_sampled = num_computed == request.num_tokens < request.max_total_tokens
        if is_sampled:
            request.num_tokens = num_computed + 1
            self._sampling.append(request)
        self._sample.append(is_sampled)
        return num_computed

    def decode(self, requests: Sequence[Request]) -> None:
        """Do as ``schedule`` does with one token for each of requests that are one behind."""
        sampling, sample = self._sampling, self._sample
        for request in requests:
            num_tokens = request.num_tokens
            request.num_computed_tokens = num_tokens
            is_sampled = num_tokens < request.max_total_tokens
            if is_sampled:
                request.num_tokens = num_tokens + 1
                sampling.append(request)
            sample.append(is_sampled)
        self.requests += requests
        self._num_tokens.extend(ONE * len(requests))

    def add_row(self, request: Request, block_ids: tuple[int, ...]) -> None:
        """Write the row of a request that is admitted in this step."""
        assert request.row is not None
        new_row = NewRow(
            row=request.row,
            number=request.number,
            token_ids=np.array(request.token_ids, dtype=np.int32),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling=request.message.sampling,
        )
        self._new_rows.append(new_row)

    def add_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Append blocks to the table of a row that was written in an earlier step."""
        self._new_blocks[row] = NewBlocks(row, block_ids)

    def drop_blocks(self, row: int) -> None:
        """Undo ``add_blocks``: the row is released in this step."""
        self._new_blocks.pop(row, None)

    def build(self, step_id: int, released_rows: tuple[int, ...]) -> LaunchedStep:
        """Make the Step; it is launched next."""
        requests = tuple(self.requests)
        num_tokens = np.array(self._num_tokens, dtype=np.int32)
        if self._previous is not None and self._previous.requests == requests:
            # Who loses its row is missing in the next step, so all these have kept theirs.
            previous = self._previous.step
            rows, starts = previous.rows, previous.num_computed_tokens + previous.num_tokens
        else:
            ends = np.array([request.num_computed_tokens for request in requests], dtype=np.int32)
            rows = np.array([request.row for request in requests], dtype=np.int32)
            starts = ends - num_tokens
        step = Step(
            step_id=step_id,
            released_rows=released_rows,
            new_rows=tuple(self._new_rows),
            copies=(),
            new_blocks=tuple(self._new_blocks.values()),
            rows=rows,
            num_tokens=num_tokens,
            num_computed_tokens=starts,
            sample=np.array(self._sample, dtype=np.bool_),
        )
        return LaunchedStep(step, requests, tuple(self._sampling))


def split_by_gap(running: Collection[Request]) -> tuple[list[Request], list[Request]]:
    """Return the running requests one token behind, and the others by growing gap.

    The latter have blocks for all their tokens.
    """
    decoding = [
        request for request in running if request.num_tokens - request.num_computed_tokens == 1
    ]
    if len(decoding) == len(running):
        return decoding, []
    gaps = {
        request: gap
        for request in running
        if (gap := request.num_tokens - request.num_computed_tokens) != 1
    }
    return decoding, sorted(gaps, key=gaps.__getitem__)
