"""What a token costs against context, and what a device gives against load: docs/benchmarks.md.

``measure`` prints one JSON line a case: the median time of a step in which ``batch`` requests of
about ``context`` tokens decode, beside its floor: weights and K/V read once at ``FLOOR_BANDWIDTH``.
Prompts are computed once and then found in the cache, so that decoding alone is timed; they have no
beginning in common. Weights are random. It takes less than a minute a model on an H200.

``draw`` reads such lines, draws them and prints the lines fitted to them as a table of Markdown
(needs matplotlib): slope = K/V over bandwidth, intercept = weights and overhead.

usage: python benchmarks/report.py measure MODEL >> FILE
       python benchmarks/report.py draw FILE docs/img
"""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from plots import Line, Panel, draw

from octavo import LLM, SamplingParams
from octavo.engine.prompt import Prompt
from octavo.sampling_params import RequestOutputKind

CONTEXTS = (128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_000)
BATCHES_OF_CONTEXTS = (1, 8)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT_OF_CONCURRENCIES = 1_024
SETTLING_STEPS = 12
"""A shape's first steps launch their kernels singly, then capture its graph."""
TIMED_STEPS = 32
FLOOR_BANDWIDTH = 4.3e12
BYTES = 2
"""Of an element of weights and K/V: bfloat16."""


@dataclass(frozen=True, slots=True)
class Case:
    """Decode steps of one size, and the bytes that they cannot but read."""

    model: str
    batch: int
    context: int
    step_ms: float
    weight_bytes: int
    kv_token_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K/V that a step reads."""
        return self.batch * self.context * self.kv_token_bytes

    @property
    def floor_ms(self) -> float:
        """What reading the bytes once takes."""
        return 1e3 * (self.weight_bytes + self.kv_bytes) / FLOOR_BANDWIDTH

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return 1e3 * self.batch / self.step_ms


def main() -> None:
    """Measure or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("model", type=Path)
    command.add_argument("--device", default="auto")
    command.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    command.add_argument("--concurrencies", type=int, nargs="+", default=CONCURRENCIES)
    command = commands.add_parser("draw")
    command.add_argument("lines", type=Path)
    command.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args)
    else:
        cases = read_cases(args.lines)
        draw_contexts(cases, args.folder / "contexts.svg")
        draw_concurrencies(cases, args.folder / "concurrencies.svg")
        print_fits(cases)


def measure(args: argparse.Namespace) -> None:
    """Print a line for each case."""
    sizes = [(batch, context) for context in args.contexts for batch in BATCHES_OF_CONTEXTS]
    sizes += [(batch, CONTEXT_OF_CONCURRENCIES) for batch in args.concurrencies]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    weight_bytes, kv_token_bytes = count_bytes(json.loads((args.model / "config.json").read_text()))
    llm = LLM(
        str(args.model),
        load_format="dummy",
        dtype="bfloat16",
        device=args.device,
        max_model_len=max(context for _, context in sizes) + SETTLING_STEPS + TIMED_STEPS + 2,
    )
    for batch, context in dict.fromkeys(sizes):
        case = Case(
            model=args.model.name,
            batch=batch,
            context=context + SETTLING_STEPS + TIMED_STEPS // 2,
            step_ms=round(time_step(llm, batch, context), 4),
            weight_bytes=weight_bytes,
            kv_token_bytes=kv_token_bytes,
        )
        line = {"benchmark": "report", "commit": commit, **asdict(case)}
        print(json.dumps(line), flush=True)
    llm.shutdown()


def time_step(llm: LLM, batch: int, context: int) -> float:
    """Return the median milliseconds of a step in which ``batch`` requests decode."""
    prompts: list[Prompt] = [
        {"prompt_token_ids": np.random.default_rng(row).integers(1_000, 40_000, context).tolist()}
        for row in range(batch)
    ]
    llm.generate(prompts, make_params(1), use_tqdm=False)  # from here on the cache has them
    for row, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(row), prompt, make_params(SETTLING_STEPS + TIMED_STEPS + 2))
    times_ms = []
    while llm.llm_engine.has_unfinished_requests():
        started = time.perf_counter()
        llm.llm_engine.step()
        times_ms.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times_ms[SETTLING_STEPS : SETTLING_STEPS + TIMED_STEPS])


def make_params(max_tokens: int) -> SamplingParams:
    """Return parameters of a request that ends at its length alone."""
    return SamplingParams(
        temperature=0.6,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def count_bytes(config: dict[str, int]) -> tuple[int, int]:
    """Return the bytes of the matrices that a token is multiplied with, and of a token's K/V."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    num_layers = config["num_hidden_layers"]
    weights = num_layers * (attention + mlp) + hidden * config["vocab_size"]
    return BYTES * weights, BYTES * num_layers * 2 * num_kv_heads * head_dim


def read_cases(path: Path) -> list[Case]:
    """Read what ``measure`` printed, of any number of models."""
    cases = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        cases.append(Case(**{item.name: line[item.name] for item in fields(Case)}))
    return cases


def group_by_context(cases: Sequence[Case]) -> dict[tuple[str, int], list[Case]]:
    """Return the cases that differ in their context alone, by model and batch, in order."""
    groups = defaultdict(list)
    for case in sorted(cases, key=lambda case: case.context):
        groups[case.model, case.batch].append(case)
    return {key: group for key, group in groups.items() if len(group) > 1}


def group_by_batch(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases of ordinary context and any batch, by model, in order."""
    groups = defaultdict(list)
    for case in sorted(cases, key=lambda case: case.batch):
        if 0 <= case.context - CONTEXT_OF_CONCURRENCIES < SETTLING_STEPS + TIMED_STEPS:
            groups[case.model].append(case)
    return groups


def fit(cases: Sequence[Case]) -> tuple[float, float]:
    """Return slope, ms a token of context, and intercept, ms, with the least relative error."""
    contexts, times_ms = zip(*((case.context, case.step_ms) for case in cases), strict=True)
    slope, intercept = np.polyfit(contexts, times_ms, 1, w=1 / np.array(times_ms))
    return float(slope), float(intercept)


def draw_contexts(cases: Sequence[Case], path: Path) -> None:
    """Draw steps and the lines fitted to them against contexts: a panel a model."""
    panels: dict[str, list[Line]] = defaultdict(list)
    for (model, batch), group in group_by_context(cases).items():
        color = BATCHES_OF_CONTEXTS.index(batch)
        slope, intercept = fit(group)
        last = group[-1].context
        fitted = [(0, intercept), (last, intercept + slope * last)]
        floors = [(case.context, case.floor_ms) for case in group]
        points = [(case.context, case.step_ms) for case in group]
        panels[model] += [
            Line(points, f"batch {batch}", "o", color),
            Line(fitted, None, "-", color),
            Line(floors, None if color else "floors", ":", color),
        ]
    draw(
        [
            Panel(
                lines=lines,
                title=model,
                xlabel="tokens of context",
                ylabel="ms a token",
                has_log_x=False,
            )
            for model, lines in panels.items()
        ],
        path,
    )


def draw_concurrencies(cases: Sequence[Case], path: Path) -> None:
    """Draw output tokens per second against the number of requests."""
    lines = []
    for color, (model, group) in enumerate(group_by_batch(cases).items()):
        floors = [(case.batch, 1e3 * case.batch / case.floor_ms) for case in group]
        lines += [
            Line([(case.batch, case.rate) for case in group], model, "o-", color),
            Line(floors, None if color else "floors", ":", color),
        ]
    panel = Panel(
        lines=lines,
        xlabel=f"requests of about {CONTEXT_OF_CONCURRENCIES:,} tokens at once",
        ylabel="output tokens/s",
        has_log_y=True,
    )
    draw([panel], path)


def print_fits(cases: Sequence[Case]) -> None:
    """Print what the fitted lines say, a row of a table each."""
    for (model, batch), group in group_by_context(cases).items():
        slope, intercept = fit(group)
        bandwidth = batch * group[0].kv_token_bytes / slope * 1e3 / 1e12
        floor_ms = 1e3 * group[0].weight_bytes / FLOOR_BANDWIDTH
        print(
            f"| {model}, {batch} | {1e3 * slope:.3f} | {bandwidth:.2f} "
            f"| {intercept:.2f} | {floor_ms:.2f} | {intercept - floor_ms:.2f} |"
        )


if __name__ == "__main__":
    main()
