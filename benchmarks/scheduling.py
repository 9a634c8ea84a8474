"""What scheduling decides, in numbers: hit rates, batching, chunking, retraction. No device.

Prints one JSON line a case; ``--plots DIR`` draws docs/scheduling.md's figures (needs matplotlib).

usage: python benchmarks/scheduling.py [--cases few_shot,tree,...] [--plots docs/img]
"""

import argparse
import json
import random
import subprocess
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
from simulation import Arrival, Simulation

from octavo.config import SchedulerConfig
from octavo.engine.launched_step import UpdatedStep
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.executor.step import StepResult

POLICIES = ("fcfs", "lpm", "dfs")
Rows = list[dict[str, Any]]


def make_config(**fields: Any) -> SchedulerConfig:
    """Return an H200's defaults for Qwen3-8B, changed by ``fields``."""
    defaults = {
        "num_blocks": 50_000,
        "block_size": 16,
        "max_num_seqs": 1_024,
        "max_num_batched_tokens": 16_384,
        "max_model_len": 40_960,
        "ranking_window": None,
    }
    return SchedulerConfig(**{**defaults, **fields})


class TokenSource:
    """Makes prompts parts that no other part equals."""

    def __init__(self) -> None:
        self._next = count(1_000)

    def take(self, num_tokens: int) -> list[int]:
        """Return tokens that were never returned before."""
        return [next(self._next) for _ in range(num_tokens)]


class SealsAtUpdate(Scheduler):
    """The ablation: blocks are keyed when a step's result is known, so no step shares inside."""

    def _seal(self, request: Request) -> None:
        """Wait for the update."""

    def update(self, result: StepResult) -> UpdatedStep:
        """Key what the step has stored."""
        updated = super().update(result)
        for request in self.running.values():
            super()._seal(request)
        return updated


def few_shot() -> Rows:
    """Waves of 8 groups x 8 questions, 13 blocks of examples a group, all of a wave at once."""
    tokens = TokenSource()
    arrivals = []
    for wave in range(10):
        groups = [tokens.take(208) for _ in range(8)]
        arrivals += [
            Arrival(groups[index % 8] + tokens.take(32), 8, at_s=float(wave)) for index in range(64)
        ]
    rows = []
    for name, kind in (("sharing inside a step", Scheduler), ("ablation", SealsAtUpdate)):
        config = make_config(policy="fcfs")
        simulation = Simulation(config, scheduler=kind(config))
        simulation.run(arrivals)
        rows.append({"case": "few_shot", "variant": name, "hit_rate": simulation.hit_rate})
    return rows


def small_pool() -> Rows:
    """4 groups with 100 blocks of examples each, interleaved; the pool holds 160 blocks."""
    tokens = TokenSource()
    groups = [tokens.take(1_600) for _ in range(4)]
    arrivals = [Arrival(groups[index % 4] + tokens.take(64), 8) for index in range(64)]
    rows = []
    for policy in POLICIES:
        simulation = Simulation(make_config(policy=policy, num_blocks=160, max_num_seqs=8))
        simulation.run(arrivals)
        rows.append({"case": "small_pool", "policy": policy, "hit_rate": simulation.hit_rate})
    return rows


def tree() -> Rows:
    """4 system prompts x 4 example groups x 8 questions, one at a time, a pool of 81 blocks."""
    tokens = TokenSource()
    prompts = []
    for _ in range(4):
        system = tokens.take(640)
        for _ in range(4):
            examples = tokens.take(480)
            prompts += [system + examples + tokens.take(160) for _ in range(8)]
    arrivals = [Arrival(prompt, 1) for prompt in prompts]
    random.Random(0).shuffle(arrivals)
    rows = []
    for policy in POLICIES:
        simulation = Simulation(make_config(policy=policy, num_blocks=81, max_num_seqs=1))
        simulation.run(arrivals)
        name = "fcfs, random order" if policy == "fcfs" else policy
        rows.append({"case": "tree", "policy": name, "hit_rate": simulation.hit_rate})
    return rows


def multi_turn() -> Rows:
    """64 chats of 4 turns (200 in, 100 out each), turn by turn; hit rate by turn and pool."""
    rows = []
    blocks_of_all = 64 * 75
    for share, policy in product((1.0, 0.5, 0.25), ("fcfs", "lpm")):
        num_blocks = int(blocks_of_all * share)
        config = make_config(policy=policy, num_blocks=num_blocks, max_num_seqs=8)
        simulation = Simulation(config)
        tokens = TokenSource()
        chats: list[list[int]] = [[] for _ in range(64)]
        for turn in range(1, 5):
            stats = simulation.scheduler.block_manager.stats
            hits, queries = stats.num_hits, stats.num_queries
            for chat in chats:
                chat += tokens.take(200)
                simulation.add(Arrival(list(chat), 100))
            while simulation.scheduler.has_unfinished_requests:
                simulation.step()
            for chat in chats:
                chat += [7] * 100
            rate = (stats.num_hits - hits) / (stats.num_queries - queries)
            row = {"policy": policy, "pool": share, "turn": turn, "hit_rate": rate}
            rows.append({"case": "multi_turn", **row})
    return rows


def batching() -> Rows:
    """Outputs exponential with mean 100, at most 512, above saturation, 64 slots, by steps."""
    generator = np.random.default_rng(0)
    outputs = np.clip(generator.exponential(100, 2_048), 1, 512).astype(int).tolist()
    tokens = TokenSource()
    prompts = [tokens.take(16) for _ in outputs]
    arrivals = [Arrival(p, n) for p, n in zip(prompts, outputs, strict=True)]
    continuous = Simulation(make_config(max_num_seqs=64))
    continuous.run(arrivals)
    static = Simulation(make_config(max_num_seqs=64))
    for start in range(0, len(arrivals), 64):
        static.run([Arrival(a.prompt, a.num_output_tokens) for a in arrivals[start : start + 64]])
    return [
        {
            "case": "batching",
            "continuous_steps": continuous.num_steps,
            "static_steps": static.num_steps,
            "ratio": static.num_steps / continuous.num_steps,
            "continuous_s": continuous.now_s,
            "static_s": static.now_s,
            "ratio_of_times": static.now_s / continuous.now_s,
        }
    ]


def chunking() -> Rows:
    """32 decoding requests, then a prompt of 32,000 tokens: gaps between the decoders' tokens."""
    rows = []
    for name, threshold, budget in (
        ("one step", None, 40_960),
        ("budget 8192", None, 8_192),
        ("chunks of 2048", 2_048, 8_192),
        ("chunks of 512", 512, 8_192),
    ):
        tokens = TokenSource()
        config = make_config(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
        simulation = Simulation(config)
        decoding = [Arrival(tokens.take(500), 600) for _ in range(32)]
        simulation.run([*decoding, Arrival(tokens.take(32_000), 16, at_s=1.0)])
        gaps = [gap for number in range(32) for gap in simulation.lives[number].gaps_s]
        long_prompt = simulation.lives[32]
        rows.append(
            {
                "case": "chunking",
                "variant": name,
                "itl_p50_ms": 1e3 * float(np.median(gaps)),
                "itl_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
                "itl_max_ms": 1e3 * max(gaps),
                "ttft_of_long_s": long_prompt.token_times_s[0] - 1.0,
            }
        )
    return rows


def retraction() -> Rows:
    """256 requests (100 in, up to 1,000 out) whose K/V takes twice the pool."""
    generator = np.random.default_rng(0)
    tokens = TokenSource()
    outputs = generator.integers(100, 1_000, 256).tolist()
    arrivals = [Arrival(tokens.take(100), n) for n in outputs]
    needed = sum(-(-(100 + n) // 16) for n in outputs)
    rows = []
    for conservativeness in (0.0, 0.5, 1.0):
        config = make_config(num_blocks=needed // 2, conservativeness=conservativeness)
        simulation = Simulation(config)
        simulation.run(arrivals)
        useful = sum(100 + n - 1 for n in outputs)  # the last token needs no K/V
        rows.append(
            {
                "case": "retraction",
                "conservativeness": conservativeness,
                "retractions": simulation.scheduler.num_retractions,
                "useful_of_computed": useful / simulation.num_computed_tokens,
                "seconds": simulation.now_s,
            }
        )
    return rows


CASES: dict[str, Callable[[], Rows]] = {
    case.__name__: case
    for case in (few_shot, small_pool, tree, multi_turn, batching, chunking, retraction)
}


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--plots", type=Path)
    args = parser.parse_args()
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    results = {name: CASES[name]() for name in args.cases.split(",")}
    for row in (row for rows in results.values() for row in rows):
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps({"benchmark": "scheduling", **rounded, "commit": commit}))
    if args.plots:
        plot(results, args.plots)


def plot(results: dict[str, Rows], folder: Path) -> None:
    """Draw hit rates by policy and by turn, and token gaps beside a long prompt."""
    import matplotlib as mpl  # not needed to measure

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    for name in ("small_pool", "tree"):
        rates = [100 * row["hit_rate"] for row in results[name]]
        axes[0].plot(POLICIES, rates, marker="o", label=name.replace("_", " "))
    axes[0].set(title="Hit rate by policy", ylabel="%", ylim=(0, 100))
    axes[0].legend()
    for share, policy in product((1.0, 0.5, 0.25), ("fcfs", "lpm")):
        rates = [
            100 * row["hit_rate"]
            for row in results["multi_turn"]
            if row["pool"] == share and row["policy"] == policy
        ]
        style = "-" if policy == "lpm" else "--"
        label = f"{policy}, pool holds {share:.0%}"
        axes[1].plot([1, 2, 3, 4], rates, style, marker="o", label=label)
    axes[1].set(title="Hit rate by turn of a chat", xlabel="turn", ylim=(0, 100))
    axes[1].set_xticks([1, 2, 3, 4])
    axes[1].legend()
    rows = results["chunking"]
    axes[2].bar([row["variant"] for row in rows], [row["itl_max_ms"] for row in rows])
    axes[2].set(title="Longest gap beside a 32k prompt", ylabel="ms", yscale="log")
    axes[2].tick_params(axis="x", labelrotation=15)
    figure.tight_layout()
    figure.savefig(folder / "scheduling.svg")


if __name__ == "__main__":
    main()
