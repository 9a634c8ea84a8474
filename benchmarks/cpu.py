"""Decode and prefill on a CPU: Octavo beside transformers and llama.cpp, in turns in one process.

Prints one JSON line for each engine and batch size: output tokens per second, prefill included, and
what decoding and prefill reach alone; each is the best of ``--repeats``. The model is the default
one: Octavo as it starts by itself and in float32, transformers in bfloat16 and in float32,
llama.cpp, one request at a time, if llama-cpp-python is installed.

usage: OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=2000 python benchmarks/cpu.py
                                [--batches 1,4,16] [--context 64] [--tokens 48] [--repeats 3]
                                [--engines octavo,octavo-float32,transformers-bfloat16,...]
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.config import Environment
from octavo.models.default_model import get_default_model

Run = Callable[[list[list[int]], int], None]


def main() -> None:
    """Measure every batch size with all engines, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default=",".join(ENGINES))
    args = parser.parse_args()
    path = get_default_model(Environment.read())
    names = [name for name in args.engines.split(",") if name != "llama.cpp" or has_llama()]
    engines = {name: ENGINES[name](path) for name in names}
    for batch in map(int, args.batches.split(",")):
        best: dict[str, tuple[float, float]] = {}
        for repeat in range(args.repeats):
            generator = torch.Generator().manual_seed(repeat)
            shape = (batch, args.context)
            prompts = torch.randint(1_000, 40_000, shape, generator=generator).tolist()
            for name, run in engines.items():
                found = measure(run, prompts, 1), measure(run, prompts, args.tokens)
                old = best.get(name, found)
                best[name] = min(old[0], found[0]), min(old[1], found[1])
        for name, (first_s, all_s) in best.items():
            report(
                engine=name,
                batch=batch,
                context=args.context,
                output_tokens_per_s=round(batch * args.tokens / all_s, 1),
                decode_tokens_per_s=round(batch * (args.tokens - 1) / (all_s - first_s), 1),
                prefill_tokens_per_s=round(batch * args.context / first_s, 1),
            )


def measure(run: Run, prompts: list[list[int]], count: int) -> float:
    """Return the seconds that an engine takes."""
    started = time.perf_counter()
    run(prompts, count)
    return time.perf_counter() - started


def create_transformers(path: Path, dtype: torch.dtype) -> Run:
    """Generate greedily, prompts side by side."""
    network: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype
    )

    def run(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )

    return run


def create_octavo(path: Path, **settings: Any) -> Run:
    """Generate greedily, all prompts at once."""
    llm = LLM(str(path), device="cpu", enable_prefix_caching=False, **settings)

    def run(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return run


def create_llama(path: Path) -> Run:
    """Generate greedily, one prompt after the other."""
    llama: Any = importlib.import_module("llama_cpp")
    network = llama.Llama(str(path), n_ctx=8_192, n_threads=os.cpu_count(), verbose=False)

    def run(prompts: list[list[int]], count: int) -> None:
        for prompt in prompts:
            network.reset()
            for _ in zip(range(count), network.generate(prompt, temp=0), strict=False):
                pass

    return run


def has_llama() -> bool:
    """Return whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


ENGINES: dict[str, Callable[[Path], Run]] = {
    "octavo": create_octavo,
    "octavo-float32": lambda path: create_octavo(path, dtype="float32"),
    "transformers-bfloat16": lambda path: create_transformers(path, torch.bfloat16),
    "transformers-float32": lambda path: create_transformers(path, torch.float32),
    "llama.cpp": create_llama,
}


def report(**result: Any) -> None:
    """Print one JSON line."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    line = {
        "benchmark": "cpu",
        "model": "SmolLM2-135M-Instruct",
        **result,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": commit,
        "device": platform.processor() or platform.machine(),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
