"""What a prompt that comes alone waits for its first token on a GPU, and what captures take.

For each length, ``--repeat`` prompts with nothing in common are generated one token each, one
behind the other; the first of them captures what has no graph yet. Prints one JSON line: ms of the
first, medians of all, and what the log tells of captures of forward passes, those at the start
included: how many there were, and the mean of their ms on the host.

usage: python benchmarks/first_token.py MODEL [--tokens 100,500,1000,2000,4000] [--repeat 9]
"""

import argparse
import json
import logging
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
    captures = Captures()
    llm = LLM(
        arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(8192, *lengths),
    )
    draw = random.Random(0)
    times_ms = {length: time_tokens(llm, length, arguments.repeat, draw) for length in lengths}
    line = {
        "benchmark": "first_token",
        "model": arguments.model,
        "device": torch.cuda.get_device_name(),
        "first_ms": {length: round(times[0], 2) for length, times in times_ms.items()},
        "ms": {length: round(statistics.median(times), 2) for length, times in times_ms.items()},
        "captures": len(captures.times_ms),
        "capture_ms": round(statistics.mean(captures.times_ms), 1),
    }
    print(json.dumps(line), flush=True)


class Captures(logging.Handler):
    """Keeps what the log says that captures of forward passes took."""

    def __init__(self) -> None:
        super().__init__()
        self.times_ms: list[float] = []
        logger = logging.getLogger("octavo.executor.graphs")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Read the part, rows, tokens and seconds of a capture."""
        if record.msg.startswith("captured") and isinstance(record.args, tuple):
            part, _, _, took_s = record.args
            if part == "forward":
                assert isinstance(took_s, float)
                self.times_ms.append(1e3 * took_s)


def time_tokens(llm: LLM, num_tokens: int, repeat: int, draw: random.Random) -> list[float]:
    """Return the ms of each prompt from the call to its token."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    times_ms = []
    for _ in range(repeat):
        prompt = [draw.randrange(1000, 40_000) for _ in range(num_tokens)]
        started_s = time.perf_counter()
        llm.generate([prompt], sampling, use_tqdm=False)
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return times_ms


if __name__ == "__main__":
    main()
