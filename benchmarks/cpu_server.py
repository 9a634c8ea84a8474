"""What HTTP costs on a CPU: chats over ``octavo serve`` beside the same chats offline.

Starts a server with the default model twice on an empty cache (its first start converts what later
ones find) and says how long it took to be ready. Then sends ``--chats`` chats at once to a server
with the user's cache, where compiled operations should be already, in turns with ``LLM.chat`` in a
process of its own: a machine's speed varies. Prints one JSON line with the median of each and of
their ratios, and the least and the largest ratio.

usage: python benchmarks/cpu_server.py [--chats 16] [--tokens 64] [--repeats 7]
                                       [--streamed] [--no-starts]
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
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
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--streamed", action="store_true", help="read answers as they are made")
    parser.add_argument("--no-starts", action="store_true", help="leave out the first two starts")
    parser.add_argument("--offline", action="store_true", help="what the other process does")
    args = parser.parse_args()
    if args.offline:
        serve_offline(args)
        return
    starts_s = [] if args.no_starts else measure_starts()
    with start_server(dict(os.environ)) as (port, _), start_offline() as measure_offline:
        pairs = [(measure_online(args, port), measure_offline()) for _ in range(1 + args.repeats)]
    del pairs[0]
    ratios = sorted(online / offline for online, offline in pairs)
    online, offline = (round(median(rates), 1) for rates in zip(*pairs, strict=True))
    line = {
        "benchmark": "cpu_server",
        "chats": args.chats,
        "tokens": args.tokens,
        "streamed": args.streamed,
        "starts_s": starts_s,
        "online_tokens_per_s": online,
        "offline_tokens_per_s": offline,
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratios[0], 3), round(ratios[-1], 3)],
    }
    print(json.dumps(line), flush=True)


def measure_starts() -> list[float]:
    """Return the seconds until a server is ready, first on an empty cache and then on that."""
    starts_s = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            with start_server({**os.environ, "OCTAVO_CACHE_DIR": cache}) as (_, start_s):
                starts_s.append(round(start_s, 1))
    return starts_s


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
    """Return output tokens per second of all chats at once over HTTP."""

    def send(index: int) -> None:
        body = {
            "messages": make_chat(index),
            "temperature": 0,
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": args.streamed,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            while response.read1():
                pass

    with ThreadPoolExecutor(args.chats) as threads:
        started_s = time.perf_counter()
        list(threads.map(send, range(args.chats)))
        took_s = time.perf_counter() - started_s
    count: int = args.chats * args.tokens
    return count / took_s


@contextmanager
def start_offline() -> Iterator[Callable[[], float]]:
    """Yield a function that lets the other process generate once; it returns tokens a second."""
    command, pipe = [sys.executable, *sys.argv, "--offline"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout
        answers.readline()

        def measure() -> float:
            print(file=ask, flush=True)
            return float(answers.readline())

        yield measure
        ask.close()


def serve_offline(args: argparse.Namespace) -> None:
    """Say when ``LLM`` is ready; then, a line read, send the same chats and write their speed."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    chats: list[Any] = [make_chat(index) for index in range(args.chats)]
    with LLM() as llm:
        print("ready", flush=True)
        for _ in sys.stdin:
            started_s = time.perf_counter()
            llm.chat(chats, params, use_tqdm=False)
            count = args.chats * args.tokens
            print(count / (time.perf_counter() - started_s), flush=True)


def make_chat(index: int) -> list[dict[str, str]]:
    """Return one short conversation."""
    return [{"role": "user", "content": QUESTION.format(index)}]


if __name__ == "__main__":
    main()
