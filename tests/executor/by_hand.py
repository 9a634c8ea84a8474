"""Runs requests on an executor without a scheduler: the tests say what each step computes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.executor.in_process import InProcessExecutor
from octavo.executor.step import NewBlocks
from octavo.executor.worker import create_runner
from tests.models.oracle import source_of
from tests.steps import make_row, make_step


def make_executor(folder, *, lag=0, load_format="safetensors", **settings):
    """Load a checkpoint; ``settings`` are fields of EngineConfig."""
    config = EngineConfig(device="cpu", **{"num_gpu_blocks_override": 64, **settings})
    return InProcessExecutor(create_runner(config, source_of(folder, load_format)), lag=lag)


@dataclass
class Request:
    row: int
    num_prompt: int
    num_computed: int
    blocks: list[int]
    num_tokens: int
    """Known, or sampled by a launched step."""
    outputs: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    error: str | None = None


class ByHand:
    """Builds Steps; reads the result of a step when the executor's lag makes it due."""

    def __init__(self, executor, *, lag=0):
        self.executor, self.lag = executor, lag
        self.block_size = executor.info.block_size
        self.next_block = 0
        self.step_id = 0
        self.new_rows, self.released = [], []
        self.requests: dict[int, Request] = {}
        self.unread = deque()

    def admit(self, row, token_ids: Sequence[int], *, blocks=(), computed=0, **more):
        """Give ``row`` to a request; it starts with ``blocks``, of which it reads ``computed``."""
        num_prompt = more.pop("num_prompt", len(token_ids))
        request = Request(row, num_prompt, computed, list(blocks), len(token_ids))
        grown = self._grow(request, len(token_ids))
        request.blocks += grown
        self.new_rows.append(
            make_row(
                row,
                number=len(self.new_rows) + 100 * self.step_id,
                token_ids=token_ids,
                num_prompt=num_prompt,
                computed=computed,
                blocks=request.blocks,
                **more,
            )
        )
        self.requests[row] = request
        return request

    def release(self, row):
        self.released.append(row)
        del self.requests[row]

    def step(self, counts: dict[int, int], *, copies=()):
        """Compute ``counts[row]`` further tokens of each row."""
        scheduled, grown, sampled = [], [], []
        for row, count in counts.items():
            request = self.requests[row]
            end = request.num_computed + count
            if new := self._grow(request, end):
                request.blocks += new
                grown.append(NewBlocks(row, tuple(new)))
            closes = end == request.num_tokens
            scheduled.append((row, count, request.num_computed, closes))
            request.num_computed = end
            if closes:
                request.num_tokens += 1
                sampled.append(request)
        step = make_step(
            self.step_id,
            scheduled,
            new=self.new_rows,
            released=self.released,
            grown=grown,
            copies=copies,
        )
        self.step_id, self.new_rows, self.released = self.step_id + 1, [], []
        rows = [self.requests[row] for row in counts]
        self.unread.append((self.executor.submit(step), rows, sampled))
        while len(self.unread) > self.lag:
            self._read()

    def decode(self, num_steps):
        """Run decode steps of all rows and read everything."""
        for _ in range(num_steps):
            self.step(dict.fromkeys(self.requests, 1))
        self.finish()

    def finish(self):
        while self.unread:
            self._read()

    def _read(self):
        handle, rows, sampled = self.unread.popleft()
        result = handle.result()
        for index, request in enumerate(sampled):
            request.outputs.append(int(result.token_ids[index]))
            if index in result.logprobs:
                request.logprobs.append(result.logprobs[index])
        for index, entries in result.prompt_logprobs.items():
            rows[index].prompt_logprobs += entries
        for index, error in result.row_errors.items():
            rows[index].error = error

    def _grow(self, request, num_tokens):
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        first, self.next_block = self.next_block, self.next_block + max(0, needed)
        return list(range(first, self.next_block))


def generate(executor, prompts, num_tokens, *, lag=0, chunk=1000, **sampling):
    """Return the outputs of requests that run side by side, prompts in chunks."""
    hand = ByHand(executor, lag=lag)
    requests = [hand.admit(row, prompt, **sampling) for row, prompt in enumerate(prompts)]
    while any(len(request.outputs) < num_tokens for request in requests):
        counts = {r.row: min(chunk, r.num_tokens - r.num_computed) for r in requests}
        hand.step(counts)
    hand.finish()
    for request in requests:
        hand.release(request.row)
    hand.step({})
    hand.finish()
    return [request.outputs[:num_tokens] for request in requests]
