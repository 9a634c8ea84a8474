"""``octavo demo``: a real server with a small model, four clients at once, and what happened."""

import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.config import Environment
from octavo.entrypoints.api_keys import read_client_key
from octavo.entrypoints.cli.generate import AnswerPrinter
from octavo.entrypoints.cli.http_client import HttpClient, ServerError
from octavo.outputs import CompletionOutput

SYSTEM_PROMPT = (
    "You are a helpful assistant named Octavo. People ask you all sorts of questions. Read each"
    " question with care and answer it in one or two short sentences. Say what you know in plain"
    " words, and stop when the question is answered."
)
QUESTIONS = (
    "What do bees make?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "What is the capital of France?",
)
MAX_TOKENS = 64
POLL_INTERVAL_S = 0.1
END_TIMEOUT_S = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments: there are none."""


def run(args: Namespace) -> int:
    """Show the server at work; 0 if every client was answered."""
    print("Starting octavo serve with the default model (fetched on first use).", flush=True)
    with running_server() as url:
        print(f"The server is at {url}; {len(QUESTIONS)} clients ask it at once.\n", flush=True)
        # The server reads the same environment, and wants the key that it finds there.
        demo = Demo(HttpClient(url, api_key=read_client_key(None, Environment.read())))
        demo.run()
    demo.print_summary()
    return 1 if demo.has_failed else 0


@dataclass(slots=True)
class Exchange:
    """What one client saw."""

    first_token_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)


class Demo:
    """Asks all questions at once, prints the answers as they come, and remembers the figures."""

    def __init__(self, client: HttpClient) -> None:
        self.has_failed = False
        self._client = client
        self._exchanges = [Exchange() for _ in QUESTIONS]
        self._pieces: SimpleQueue[tuple[int, CompletionOutput]] = SimpleQueue()
        self._pool_usage = 0.0
        self._num_blocks = 0
        self._passed_s = 0.0

    def run(self) -> None:
        """Ask, and print until every client has its answer."""
        start_s = time.monotonic()
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            for index in range(len(QUESTIONS)):
                threads.submit(self._ask, index, start_s)
            self._print_answers()
        self._passed_s = time.monotonic() - start_s

    def print_summary(self) -> None:
        """Print what happened."""
        usages = [exchange.usage for exchange in self._exchanges if exchange.usage]
        num_prompt = sum(usage["prompt_tokens"] for usage in usages)
        num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        num_output = sum(usage["completion_tokens"] for usage in usages)
        times = sorted(1_000 * exchange.first_token_s for exchange in self._exchanges)
        used = round(self._pool_usage * self._num_blocks)
        print(
            f"time to first token  {times[0]:.0f} to {times[-1]:.0f} ms\n"
            f"speed                {num_output / self._passed_s:.1f} tokens/s,"
            f" {num_output} tokens in {self._passed_s:.1f} s\n"
            f"prompt tokens        {num_prompt}, {num_cached} of them from the cache\n"
            f"KV blocks            {used} in use of {self._num_blocks}"
        )

    def _ask(self, index: int, start_s: float) -> None:
        """Be one client; runs in a thread."""
        body = {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": QUESTIONS[index]},
            ],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "stream_options": {"include_usage": True},
        }
        exchange = self._exchanges[index]
        end = CompletionOutput(0, "", [], finish_reason="stop")
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                exchange.first_token_s = exchange.first_token_s or time.monotonic() - start_s
                exchange.usage = event["usage"] or {}
                for choice in event["choices"]:
                    text = choice["delta"]["content"]
                    self._pieces.put((index, CompletionOutput(0, text, [])))
        except ServerError as error:
            end = CompletionOutput(0, "", [], finish_reason="error", error=str(error))
        self._pieces.put((index, end))

    def _print_answers(self) -> None:
        printer = AnswerPrinter(len(QUESTIONS), sys.stdout)
        begun: set[int] = set()
        num_ended = 0
        while num_ended < len(QUESTIONS):
            index, piece = self._pieces.get()
            printer.add(index, piece)
            num_ended += piece.finished
            if index not in begun:
                begun.add(index)
                self._read_pool()
        self.has_failed = printer.has_failed

    def _read_pool(self) -> None:
        text = self._client.get("/metrics").decode()
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        for sample in samples:
            if sample.name == "vllm:kv_cache_usage_perc":
                self._pool_usage = max(self._pool_usage, sample.value)
            elif sample.name == "vllm:cache_config_info":
                self._num_blocks = int(sample.labels["num_gpu_blocks"])


@contextmanager
def running_server(*arguments: str) -> Iterator[str]:
    """Run ``octavo serve`` on a free port and end it afterwards; yield its URL when it is ready.

    Raises:
        ServerError: the server has ended instead.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    main = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"
    quiet = ("--log-level", "warning", "--no-access-log")  # answers are printed where the log goes
    command = [sys.executable, "-c", main, "serve", "--port", str(port), *quiet, *arguments]
    with subprocess.Popen(command) as process:
        try:
            client = HttpClient(f"http://127.0.0.1:{port}")
            while not _is_ready(client):
                if process.poll() is not None:
                    raise ServerError(f"the server ended with status {process.returncode}")
                time.sleep(POLL_INTERVAL_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def _is_ready(client: HttpClient) -> bool:
    try:
        client.get("/ready")
    except ServerError:
        return False
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
