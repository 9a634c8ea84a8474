"""What a prompt that comes alone waits for its first token on a GPU, and what captures take.

For each length, ``--repeat`` prompts with nothing in common are generated one token each, one
behind the other; then all shapes that have no graph yet are captured, as an idle server does, and
so many prompts again. Prints one JSON line: medians in ms before and after, and host ms a capture.

usage: python benchmarks/first_token.py MODEL [--tokens 100,500,1000,2000,4000] [--repeat 9]
"""

import argparse
import json
import random
import statistics
import time

import torch

from octavo import LLM, SamplingParams


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", default="100,500,1000,2000,4000", help="lengths, with commas")
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.tokens.split(",")]
    llm = LLM(
        arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(8192, *lengths),
    )
    draw = random.Random(0)
    before = {length: find_latency_ms(llm, length, arguments.repeat, draw) for length in lengths}
    captures_ms = capture_all(llm)
    after = {length: find_latency_ms(llm, length, arguments.repeat, draw) for length in lengths}
    line = {
        "benchmark": "first_token",
        "model": arguments.model,
        "device": torch.cuda.get_device_name(),
        "ms": before,
        "captures": len(captures_ms),
        "capture_ms": round(statistics.mean(captures_ms), 1) if captures_ms else None,
        "ms_captured": after,
    }
    print(json.dumps(line), flush=True)


def find_latency_ms(llm: LLM, num_tokens: int, repeat: int, draw: random.Random) -> float:
    """Return the median time of a prompt from the call to its token."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    times_ms = []
    for _ in range(repeat):
        prompt = [draw.randrange(1000, 40_000) for _ in range(num_tokens)]
        started_s = time.perf_counter()
        llm.generate([prompt], sampling, use_tqdm=False)
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return round(statistics.median(times_ms), 2)


def capture_all(llm: LLM) -> list[float]:
    """Capture every shape without a graph; return what the host took for each, ms."""
    runner = llm.llm_engine._client._core._executor._runner  # type: ignore[attr-defined]  # no API
    times_ms: list[float] = []
    while True:
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        if not runner.prepare():
            return times_ms
        times_ms.append(1e3 * (time.perf_counter() - started_s))


if __name__ == "__main__":
    main()
