"""What HTTP costs on a CPU: chats over ``octavo serve`` beside the same chats offline.

Starts a server with the default model twice on an empty cache (its first start converts what later
ones find) and says how long it took to be ready. Then sends ``--chats`` chats at once to a server
with the user's cache, where compiled operations should be already, and compares with ``LLM.chat``
in a process of its own. Prints one JSON line.

usage: python benchmarks/cpu_server.py [--chats 16] [--tokens 64] [--repeats 3]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from octavo import LLM, SamplingParams

COMMAND = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"
QUESTION = "Write a story about the number {}."
START_LIMIT_S = 120


def main() -> None:
    """Measure starts, the server, and the same work offline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--offline", action="store_true", help="what the other process does")
    args = parser.parse_args()
    if args.offline:
        print(measure_offline(args))
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OCTAVO_CACHE_DIR": cache}
        starts_s = []
        for _ in range(2):
            with start_server(environment) as (_, start_s):
                starts_s.append(round(start_s, 1))
    with start_server(dict(os.environ)) as (port, _):
        online = measure_online(args, port)
    offline = float(subprocess.check_output([sys.executable, *sys.argv, "--offline"], text=True))
    line = {
        "benchmark": "cpu_server",
        "chats": args.chats,
        "tokens": args.tokens,
        "first_start_s": starts_s[0],
        "later_start_s": starts_s[1],
        "online_tokens_per_s": round(online, 1),
        "offline_tokens_per_s": round(offline, 1),
        "ratio": round(online / offline, 3),
    }
    print(json.dumps(line), flush=True)


@contextmanager
def start_server(environment: dict[str, str]) -> Iterator[tuple[int, float]]:
    """Yield the port of a server that is ready, and how long that took; then end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    started_s = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--port", str(port), "--log-level", "error"],
        env=environment,
    )
    try:
        while not is_ready(port):
            if time.perf_counter() - started_s > START_LIMIT_S:
                raise TimeoutError(f"the server is not ready after {START_LIMIT_S} s")
            time.sleep(0.02)
        yield port, time.perf_counter() - started_s
    finally:
        server.terminate()
        server.wait()


def is_ready(port: int) -> bool:
    """Return whether the server takes requests."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1)
    except (OSError, urllib.error.URLError):
        return False
    return True


def measure_online(args: argparse.Namespace, port: int) -> float:
    """Return output tokens per second of all chats at once over HTTP, the best of some times."""

    def send(index: int) -> int:
        body = {
            "messages": make_chat(index),
            "temperature": 0,
            "max_tokens": args.tokens,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            count: int = json.load(response)["usage"]["completion_tokens"]
        return count

    best = 0.0
    with ThreadPoolExecutor(args.chats) as threads:
        for _ in range(1 + args.repeats):
            started_s = time.perf_counter()
            count = sum(threads.map(send, range(args.chats)))
            best = max(best, count / (time.perf_counter() - started_s))
    return best


def measure_offline(args: argparse.Namespace) -> float:
    """Return output tokens per second of the same chats through ``LLM``."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    chats: list[Any] = [make_chat(index) for index in range(args.chats)]
    best = 0.0
    with LLM() as llm:
        for _ in range(1 + args.repeats):
            started_s = time.perf_counter()
            outputs = llm.chat(chats, params, use_tqdm=False)
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            best = max(best, count / (time.perf_counter() - started_s))
    return best


def make_chat(index: int) -> list[dict[str, str]]:
    """Return one short conversation."""
    return [{"role": "user", "content": QUESTION.format(index)}]


if __name__ == "__main__":
    main()
