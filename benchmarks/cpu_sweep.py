"""Decoding on a CPU against the number of requests and the length of their contexts.

Prints one JSON line a case; ``--plot FILE`` draws docs/benchmarks.md's figure (needs matplotlib).
Prompts are computed once and then found in the cache, so that decoding alone is timed, at its best
of some times. The model is the default one as it starts by itself.

usage: python benchmarks/cpu_sweep.py [--plot docs/img/cpu.svg] [--tokens 12] [--repeats 5]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from plots import Line, Panel, draw

from octavo import LLM, SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1_024, 2_048, 4_096, 8_000)
SHORT_CONTEXT = 128
BATCHES_OF_CONTEXTS = (1, 8)
MAX_TOKENS_IN_ALL = 16_384


def main() -> None:
    """Measure all cases and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    cases = [(batch, SHORT_CONTEXT) for batch in BATCHES]
    cases += [
        (batch, context)
        for batch in BATCHES_OF_CONTEXTS
        for context in CONTEXTS
        if context > SHORT_CONTEXT and batch * context <= MAX_TOKENS_IN_ALL
    ]
    rates = {}
    with LLM(device="cpu") as llm:
        for batch, context in cases:
            rate = measure(llm, batch, context, num_tokens=args.tokens, repeats=args.repeats)
            rates[batch, context] = round(rate, 1)
            line = {"batch": batch, "context": context, "tokens_per_s": rates[batch, context]}
            print(json.dumps({"benchmark": "cpu_sweep", **line}), flush=True)
    if args.plot:
        draw_rates(rates, args.plot)


def measure(llm: LLM, batch: int, context: int, *, num_tokens: int, repeats: int) -> float:
    """Return the tokens per second that some requests of this length decode together."""
    shape = (batch, context)
    prompts = np.random.default_rng(context).integers(1_000, 40_000, shape).tolist()

    def run(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        started_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started_s

    run(1)  # computes the prompts
    first_s = min(run(1) for _ in range(repeats))
    return batch * (num_tokens - 1) / (min(run(num_tokens) for _ in range(repeats)) - first_s)


def draw_rates(rates: dict[tuple[int, int], float], path: Path) -> None:
    """Draw rates against batch sizes, and against contexts."""
    left = Panel(
        lines=[Line([(batch, rates[batch, SHORT_CONTEXT]) for batch in BATCHES])],
        xlabel=f"requests of {SHORT_CONTEXT} tokens",
        ylabel="output tokens/s",
    )
    lines = [
        Line([(c, rates[batch, c]) for c in CONTEXTS if (batch, c) in rates], f"{batch} at once")
        for batch in BATCHES_OF_CONTEXTS
    ]
    draw([left, Panel(lines=lines, xlabel="tokens of context")], path)


if __name__ == "__main__":
    main()
