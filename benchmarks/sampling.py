"""Speed of the sampling and glue kernels on one GPU, alone: one JSON line a case.

Random data; one graph of calls over so many buffers that nothing is read twice from L2; the median
of its replays divided by its calls. The floor is the fewest bytes a call must move over the card's
copy bandwidth. Logits are normal: with spread 1 half the vocabulary is likely, with spread 4 a few
hundred tokens are, as in a language model.

usage: python benchmarks/sampling.py [sample edits logprobs inputs glue] [--rows 1,8,64,256]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.executor.device_rows import DeviceRows
from octavo.executor.ops.edit_logits import edit_logits
from octavo.executor.ops.logprobs import compute_logprobs
from octavo.executor.ops.prepare_inputs import DeviceBatch, prepare_inputs
from octavo.executor.ops.row_parameters import PENALTIES, ROW_PARAMETERS
from octavo.executor.ops.sample import SampledRows, SampleWorkspace, sample
from octavo.models.ops.activation import silu_mul
from octavo.models.ops.norm import add_rms_norm, rms_norm

COPY_BYTES_PER_S = 4.3e12
L2_BYTES = 60e6
VOCAB_SIZE = 151_936  # Qwen3
MAX_MODEL_LEN = 2048
CONTEXT = 1000
NUM_REPLAYS = 20
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


@dataclass(frozen=True)
class Case:
    """Calls that do the same to different buffers, and the bytes that one of them must move."""

    name: str
    settings: Mapping[str, object]
    num_bytes: float
    calls: Sequence[Callable[[], object]]


def main() -> None:
    """Run the groups of cases that are named, all of them without a name."""
    parser = argparse.ArgumentParser(description=__doc__)
    groups = {
        "sample": sample_cases,
        "edits": edit_cases,
        "logprobs": logprob_cases,
        "inputs": input_cases,
        "glue": glue_cases,
    }
    parser.add_argument("groups", nargs="*", default=list(groups))
    parser.add_argument("--rows", default="1,8,64,256")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.groups:
        for num_rows in map(int, args.rows.split(",")):
            for case in groups[name](num_rows):
                report(case)


def report(case: Case) -> None:
    """Time a case and print its line."""
    time_us = measure(case.calls) * 1e6
    floor_us = case.num_bytes / COPY_BYTES_PER_S * 1e6
    line = {
        "device": torch.cuda.get_device_name(),
        "case": case.name,
        **case.settings,
        "us": round(time_us, 2),
        "floor_us": round(floor_us, 2),
    }
    print(json.dumps(line), flush=True)


def measure(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds that one of the calls takes, replayed from one graph of all."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(3 + NUM_REPLAYS):
        start, end = (
            torch.Event("cuda", enable_timing=True),
            torch.Event("cuda", enable_timing=True),
        )
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[3:])


def sample_cases(num_rows: int) -> Iterator[Case]:
    """Every kind of row alone, and all kinds in one batch."""
    workspace = SampleWorkspace.create(num_rows, "cuda")
    for spread in (1.0, 4.0):
        buffers = make_logits(num_rows, spread)
        for name, params in {**KINDS, "all kinds": None}.items():
            kinds = list(KINDS.values()) if params is None else [params]
            batch = make_rows(num_rows, kinds)
            calls = [partial(sample, logits, batch, workspace=workspace) for logits in buffers]
            yield Case(name, {"rows": num_rows, "spread": spread}, num_rows * VOCAB_SIZE * 2, calls)


def edit_cases(num_rows: int) -> Iterator[Case]:
    """Penalties on every row, over a history of CONTEXT tokens; then greedy sampling."""
    workspace = SampleWorkspace.create(num_rows, "cuda")
    edited = torch.empty((num_rows, VOCAB_SIZE), dtype=torch.float32, device="cuda")
    penalties: dict[str, float] = {
        "edits": PENALTIES,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    for name, kind in {"no row": {}, "every row": penalties}.items():
        batch = make_rows(num_rows, [kind])

        def call(logits: Tensor, batch: SampledRows) -> None:
            edit_logits(logits, batch, edited=edited)
            sample(logits, batch, workspace=workspace, edited=edited)

        calls = [partial(call, logits, batch) for logits in make_logits(num_rows, 4.0)]
        # Clear, read and write the copy, read it again to sample; without edits, logits alone.
        num_bytes = 2 + (16 if kind else 0)
        settings = {"rows": num_rows, "penalties": name}
        yield Case("edit + greedy", settings, num_rows * VOCAB_SIZE * num_bytes, calls)


def logprob_cases(num_rows: int) -> Iterator[Case]:
    """The sampled token's log-probability alone, and with the five likeliest."""
    token_ids = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    for num_top in (0, 5, 20):
        calls = [
            partial(compute_logprobs, logits, token_ids, num_top=num_top)
            for logits in make_logits(num_rows, 4.0)
        ]
        settings = {"rows": num_rows, "top": num_top}
        yield Case("logprobs", settings, num_rows * VOCAB_SIZE * 2, calls)


def input_cases(num_rows: int) -> Iterator[Case]:
    """A decode step, and a step whose first row is a chunk of the whole length."""
    rows = DeviceRows.create(num_rows, max_model_len=MAX_MODEL_LEN, block_size=16, device="cuda")
    for tensor in (rows.token_ids, rows.block_tables):
        tensor.random_(1000)
    for name, longest in {"decode": 1, "chunk": CONTEXT}.items():
        columns = torch.ones((4, num_rows), dtype=torch.int32, device="cuda")
        columns[0] = torch.randperm(num_rows, device="cuda")
        columns[1, 0] = longest
        columns[2] = CONTEXT
        num_tokens = num_rows - 1 + longest
        batch = DeviceBatch.create(
            num_rows, num_tokens, max_num_blocks=rows.block_tables.shape[1], device="cuda"
        )

        call = partial(
            prepare_inputs,
            columns,
            token_ids=rows.token_ids,
            block_tables=rows.block_tables,
            block_size=16,
            out=batch,
            max_row_tokens=longest,
        )
        num_bytes = num_tokens * 20 + num_rows * (CONTEXT // 16) * 8
        yield Case("inputs", {"rows": num_rows, "step": name}, num_bytes, [call] * 20)


def glue_cases(num_rows: int) -> Iterator[Case]:
    """Norms and activation of Qwen3-8B's sizes."""
    hidden, inner = 4096, 12_288
    weight = torch.randn(hidden, dtype=torch.bfloat16, device="cuda")
    wide = make_buffers(num_rows, 2 * inner)
    narrow = make_buffers(num_rows, hidden)
    residual, out = torch.randn_like(narrow[0]), torch.empty_like(narrow[0])
    activated = torch.empty_like(wide[0][:, :inner])
    norms = [partial(rms_norm, x, weight, eps=1e-6, out=out) for x in narrow]
    outputs = (out, residual)
    sums = [partial(add_rms_norm, x, residual, weight, eps=1e-6, out=outputs) for x in narrow]
    gates = [partial(silu_mul, x, out=activated) for x in wide]
    settings = {"rows": num_rows}
    yield Case("rms_norm", settings, num_rows * hidden * 4, norms)
    yield Case("add_rms_norm", settings, num_rows * hidden * 8, sums)
    yield Case("silu_mul", settings, num_rows * inner * 6, gates)


def make_buffers(num_rows: int, width: int) -> list[Tensor]:
    """Make so many that they fill L2 three times; at most 200."""
    count = min(200, max(3, math.ceil(3 * L2_BYTES / (num_rows * width * 2))))
    shape = (count, num_rows, width)
    return list(torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_())


def make_logits(num_rows: int, spread: float) -> list[Tensor]:
    """Make buffers of normal logits."""
    return [buffer.mul_(spread) for buffer in make_buffers(num_rows, VOCAB_SIZE)]


def make_rows(num_rows: int, kinds: list[dict[str, float]]) -> SampledRows:
    """Make rows of these kinds in turn, each with a seed and a history of its own."""
    records = np.zeros(num_rows, dtype=ROW_PARAMETERS)
    records["top_p"] = records["repetition_penalty"] = 1.0
    records["seed"] = np.arange(num_rows) + 1000
    records["num_prompt_tokens"] = CONTEXT // 2
    for index in range(num_rows):
        for name, value in kinds[index % len(kinds)].items():
            records[name][index] = value
    words = torch.from_numpy(records.view(np.int32).reshape(num_rows, -1))
    history = torch.randint(VOCAB_SIZE, (num_rows, MAX_MODEL_LEN), device="cuda")
    return SampledRows(
        rows=torch.randperm(num_rows, device="cuda").int(),
        positions=torch.full((num_rows,), CONTEXT, dtype=torch.int32, device="cuda"),
        parameters=words.cuda(),
        history=history.int(),
    )


if __name__ == "__main__":
    main()
