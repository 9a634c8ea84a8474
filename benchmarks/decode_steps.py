"""What decode steps of one batch on a GPU spend: on the host, on the device, and between steps.

Runs ``--batch`` requests of ``--context`` tokens until all decode, then measures ``--steps`` steps
twice: by the clock alone, and under torch's profiler, which tells the kernels of a step, their
times and how long the device idles between the last kernel of one step and the first of the next.
Host work is what a step costs the engine's thread besides waiting for the device. Prints one JSON
line a batch; ``--parts`` adds the host work by parts, whose clocks add to it, and ``--kernels`` a
table.

usage: python benchmarks/decode_steps.py MODEL [--batch 1,64] [--context 1024] [--kernels] [--parts]
           [--quantization fp8] [--kv-cache-dtype fp8]
"""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.scheduler import Scheduler
from octavo.executor.device_runner import DeviceRunner, LaunchedStep
from octavo.executor.graphs import StepGraphs
from octavo.executor.staging import ReadbackRing
from octavo.executor.step import StepResult
from octavo.executor.step_uploads import StepUploads
from octavo.sampling_params import RequestOutputKind

SETTLING_STEPS = 20
MAX_STEP_TOKENS = 16_384
PARTS: dict[str, tuple[type, str]] = {
    "core": (EngineCore, "step"),
    "plan": (Scheduler, "plan"),
    "launch": (DeviceRunner, "launch"),
    "upload": (StepUploads, "send"),
    "graphs": (StepGraphs, "run"),
    "readback": (ReadbackRing, "fetch"),
    "result": (LaunchedStep, "wait"),
    "update": (Scheduler, "update"),
    "outputs": (RequestTracker, "update"),
    "waiting": (torch.cuda.Event, "synchronize"),
}
"""Methods whose time is told apart, each without that of those within it."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", default="64", help="numbers of requests, with commas")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        load_format="dummy",
        dtype="bfloat16",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=36_000,
    )
    for batch in map(int, args.batch.split(",")):
        measure(llm, batch, args)


def measure(llm: LLM, batch: int, args: argparse.Namespace) -> None:
    """Measure steps of so many requests, print, and end the requests."""
    add_requests(llm, batch, args.context, args.steps)
    run_steps(llm, SETTLING_STEPS)
    with recorded_waits() as waits_s:
        started = time.perf_counter()
        run_steps(llm, args.steps)
        step_us = 1e6 * (time.perf_counter() - started) / args.steps
    host_us = step_us - 1e6 * sum(waits_s) / args.steps
    result = {"batch": batch, "step_us": step_us, "host_us": host_us}
    if args.parts:
        result |= measure_parts(llm, args.steps)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run_steps(llm, args.steps)
        torch.cuda.synchronize()
    events = find_device_events(profiler)
    result |= describe(events, args.steps)
    report(args, {name: round(value, 1) for name, value in result.items()})
    if args.kernels:
        print_kernels(events, args.steps)
    llm.llm_engine.abort_request(map(str, range(batch)))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def add_requests(llm: LLM, batch: int, context: int, steps: int) -> None:
    """Queue requests of random tokens and compute their prompts."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = 3 * steps + 2 * SETTLING_STEPS + batch
    for index in range(batch):
        prompt = torch.randint(100, 40_000, (context,), generator=generator).tolist()
        params = SamplingParams(
            temperature=0.6,
            ignore_eos=True,
            max_tokens=num_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    run_steps(llm, 1 + batch * context // MAX_STEP_TOKENS)


def run_steps(llm: LLM, count: int) -> None:
    """Let the engine report so many steps."""
    for _ in range(count):
        llm.llm_engine.step()


@contextmanager
def recorded_waits() -> Iterator[list[float]]:
    """Give the list that the seconds of every wait for the device are appended to."""
    waits_s: list[float] = []
    wait = LaunchedStep.wait

    def timed(launched: LaunchedStep) -> StepResult:
        started = time.perf_counter()
        if launched.readback is not None:
            launched.readback.slot.free.synchronize()
        waits_s.append(time.perf_counter() - started)
        return wait(launched)

    with patch.object(LaunchedStep, "wait", timed):
        yield waits_s


def measure_parts(llm: LLM, steps: int) -> dict[str, float]:
    """Return the us that a step spends in each part; ``engine`` is what lies outside of all."""
    with Clocks.around(PARTS) as clocks:
        run_steps(llm, steps)
    return {f"{name}_us": 1e6 * spent / steps for name, spent in clocks.spent_s.items()}


class Clocks:
    """Charges time to the innermost of the parts that are under way."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._parts = ["engine"]
        self._charged_s = time.perf_counter()

    @classmethod
    @contextmanager
    def around(cls, parts: dict[str, tuple[type, str]]) -> Iterator["Clocks"]:
        """Time the named methods until the end of the block."""
        clocks = cls()
        with ExitStack() as patches:
            for part, (owner, name) in parts.items():
                method = clocks.timed(part, getattr(owner, name))
                patches.enter_context(patch.object(owner, name, method))
            yield clocks
            clocks._charge()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with clocks at its two ends."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._parts.pop()

        return call

    def _charge(self) -> None:
        now_s = time.perf_counter()
        self.spent_s[self._parts[-1]] += now_s - self._charged_s
        self._charged_s = now_s


def find_device_events(profiler: Any) -> list[tuple[str, float, float]]:
    """Return name, start and end in us of all that ran on the device, in order."""
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return sorted(events, key=lambda event: event[1])


def describe(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, float]:
    """Return busy time of a step, launches, and the idle time between steps."""
    idles = []
    for (name, _, end), (_, next_start, _) in pairwise(events):
        if "DtoH" in name:  # the read-back ends a step
            idles.append(max(0.0, next_start - end))
    busy = sum(end - start for _, start, end in events)
    ordered = sorted(idles)
    return {
        "busy_us": busy / steps,
        "kernels_and_copies": len(events) / steps,
        "idle_p50_us": statistics.median(ordered),
        "idle_p99_us": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def print_kernels(events: Sequence[tuple[str, float, float]], steps: int) -> None:
    """Print count and time of a step by kernel, the dearest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, start, end in events:
        times[name].append(end - start)
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(
            f"{sum(spent) / steps:9.1f} us {len(spent) / steps:6.1f} x "
            f"{sum(spent) / len(spent):8.2f}  {name[:90]}"
        )


def report(args: argparse.Namespace, result: dict[str, float]) -> None:
    """Print one JSON line."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    line = {
        "benchmark": "decode_steps",
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "model": args.model.rstrip("/").split("/")[-1],
        "context": args.context,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        **result,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
