"""Decode and prefill on a CPU: Octavo beside transformers, interleaved in one process.

Prints one JSON line for each engine and batch size: tokens per second, best of ``--repeats``. The
model is the default one in float32; both engines use the same threads.

usage: python benchmarks/cpu.py [--batches 1,16] [--tokens 48] [--repeats 3]
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.config import Environment
from octavo.models.default_model import get_default_model

PROMPT_LEN = 64


def main() -> None:
    """Measure every batch size with both engines, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    path = get_default_model(Environment.read())
    network = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    llm = LLM(str(path), dtype="float32", device="cpu", enable_prefix_caching=False)
    engines: dict[str, Callable[[list[list[int]], int], None]] = {
        "transformers": lambda prompts, count: run_transformers(network, prompts, count),
        "octavo": lambda prompts, count: run_octavo(llm, prompts, count),
    }
    for batch in map(int, args.batches.split(",")):
        best = dict.fromkeys(engines, float("inf"))
        for repeat in range(args.repeats):
            generator = torch.Generator().manual_seed(repeat)
            shape = (batch, PROMPT_LEN)
            prompts = torch.randint(1_000, 40_000, shape, generator=generator).tolist()
            for name, run in engines.items():
                started = time.perf_counter()
                run(prompts, args.tokens)
                best[name] = min(best[name], time.perf_counter() - started)
        for name, seconds in best.items():
            report(name, batch, batch * args.tokens / seconds)


def run_transformers(network: Any, prompts: list[list[int]], count: int) -> None:
    """Generate greedily, prompts side by side."""
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


def run_octavo(llm: LLM, prompts: list[list[int]], count: int) -> None:
    """Generate greedily, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


def report(engine: str, batch: int, rate: float) -> None:
    """Print one JSON line."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    line = {
        "benchmark": "cpu",
        "engine": engine,
        "model": "SmolLM2-135M-Instruct, float32",
        "batch": batch,
        "output_tokens_per_s": round(rate, 1),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": commit,
        "device": platform.processor() or platform.machine(),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
