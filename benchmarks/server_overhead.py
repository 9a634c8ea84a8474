"""What the server adds to the time to first token of ``LLM``: HTTP, JSON, processes and sockets.

Sequential requests over one connection, and the same ones to an ``LLM`` in this process, in turns
of a few dozen, so that each finds its caches warm and both see the same machine. The network is
tiny and random, so that what is measured is not the model. Prints one JSON line.

One thread computes in each process: on two cores a second one, which the network is too small for,
would take turns with the other process, and ``LLM``'s would spin while the server is measured.

usage: OMP_NUM_THREADS=1 python benchmarks/server_overhead.py [--requests 200] [--prompt-words 40]
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from octavo import LLM, SamplingParams
from octavo.config import Environment
from octavo.entrypoints.cli.demo import running_server
from octavo.models.default_model import get_default_model
from octavo.sampling_params import RequestOutputKind

NETWORK = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
WORDS = ["page", "of", "type", "set", "by", "hand", "and", "then", "ink", "is", "laid", "on", "it"]
NUM_ROUNDS = 10
END = b"0\r\n\r\n"
"""Of a body whose length is not known before."""
NUM_WARM_UP = 5
"""Requests at the begin of each turn that do not count."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-words", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(NETWORK))
        tokenizer = str(get_default_model(Environment.read()))
        settings = {"tokenizer": tokenizer, "load_format": "dummy", "num_gpu_blocks_override": 512}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with LLM(folder, **settings) as llm, running_server(folder, *options) as url:
            offline, served = measure(llm, url, args.requests, args.prompt_words)
    report(args, offline, served)


def measure(
    llm: LLM, url: str, num_requests: int, num_words: int
) -> tuple[list[float], list[float]]:
    """Return the times to first token of both."""
    choose = random.Random(0).choices
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    offline: list[float] = []
    served: list[float] = []
    for _ in range(NUM_ROUNDS):
        num_turn = NUM_WARM_UP + num_requests // NUM_ROUNDS
        prompts = [" ".join(choose(WORDS, k=num_words)) for _ in range(num_turn)]
        offline += [time_offline(llm, prompt) for prompt in prompts][NUM_WARM_UP:]
        served += [time_served(connection, prompt) for prompt in prompts][NUM_WARM_UP:]
    connection.close()
    return offline, served


def time_offline(llm: LLM, prompt: str) -> float:
    """Return the seconds from asking to the first text, as ``LLM`` gives it."""
    params = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    engine = llm.llm_engine
    start = time.perf_counter()
    engine.add_request("r", prompt, params)
    while not engine.step():
        pass
    passed = time.perf_counter() - start
    while engine.has_unfinished_requests():
        engine.step()
    return passed


def time_served(connection: socket.socket, prompt: str) -> float:
    """Return the seconds from asking to the first event, for a client as cheap as it can be."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + data
    start = time.perf_counter()
    connection.sendall(request)
    received = receive_until(connection, b"data: {")
    passed = time.perf_counter() - start
    assert received.startswith(b"HTTP/1.1 200 "), received
    if not received.endswith(END):
        receive_until(connection, END)
    return passed


def receive_until(connection: socket.socket, mark: bytes) -> bytes:
    """Return what has come when the mark has."""
    received = b""
    while mark not in received:
        part = connection.recv(2**16)
        assert part, f"the server closed the connection after {received!r}"
        received += part
    return received


def report(args: argparse.Namespace, offline: list[float], served: list[float]) -> None:
    """Print one JSON line."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    added = [passed - statistics.median(offline) for passed in served]
    line = {
        "benchmark": "server_overhead",
        "requests": args.requests,
        "prompt_words": args.prompt_words,
        "llm_ttft_median_ms": round(1e3 * statistics.median(offline), 2),
        "server_ttft_median_ms": round(1e3 * statistics.median(served), 2),
        "overhead_median_ms": round(1e3 * statistics.median(added), 2),
        "overhead_p95_ms": round(1e3 * statistics.quantiles(added, n=20)[-1], 2),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": commit,
        "device": platform.processor() or platform.machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
