"""What the front end can stream: 200 clients of a real server whose core only makes up tokens.

Prints one JSON line a case. ``flat out`` measures tokens: the core never waits, and what a stream
has not sent yet is sent as one event. ``paced`` measures events: every token of a stream is one.
Server, core and clients are three processes.

usage: python benchmarks/streaming.py [--clients 200] [--tokens 2000] [--steps-per-s 40]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import uvloop

from octavo.config import EngineConfig, Environment
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.ipc_client import IpcClient
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreStats,
    FinishedRequest,
    StartedRequest,
)
from octavo.engine.metrics import EngineMetrics
from octavo.entrypoints.credentials import Credentials
from octavo.entrypoints.http.listener import bind
from octavo.entrypoints.openai.server import Server
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.served_model import load_served_model
from octavo.entrypoints.server_settings import ServerSettings
from octavo.models.source import resolve_source

TIMEOUT_S = 300
VOCAB_SIZE = 49_152
FIRST_TOKEN_ID = 1_000  # SmolLM2's ids from here on are pieces of ordinary words


def main() -> None:
    """Run both cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of a stream, flat out")
    parser.add_argument("--steps-per-s", type=float, default=40.0, help="of the paced case")
    args = parser.parse_args()
    paced_tokens = round(10 * args.steps_per_s)
    for case, step_time_s, num_tokens in (
        ("flat out", 0.0, args.tokens),
        ("paced", 1 / args.steps_per_s, paced_tokens),
    ):
        totals = measure(args.clients, num_tokens, step_time_s)
        report(case, args.clients, num_tokens, totals)


@dataclass
class Totals:
    """What the clients received."""

    num_events: int = 0
    num_bytes: int = 0
    num_ended: int = 0
    cpu_s: float = 0.0
    """Processor time of the API process."""
    first_s: float = 0.0
    last_s: float = 0.0


def measure(num_clients: int, num_tokens: int, step_time_s: float) -> Totals:
    """Start a server, read ``num_clients`` streams at once, and stop it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sender, step_time_s))
    server.start()
    try:
        port = receiver.recv()
        totals = uvloop.run(read_streams(port, num_clients, num_tokens))
    finally:
        server.terminate()
        server.join()
    totals.cpu_s = receiver.recv()
    return totals


def serve(sender: Any, step_time_s: float) -> None:
    """Be the server's process: send the port, serve until SIGTERM."""
    client = IpcClient(partial(MadeUpCore, step_time_s))
    try:
        client.wait_until_ready()
        config, environment = EngineConfig(), Environment.read()
        model = load_served_model(config, resolve_source(config, environment), environment)
        metrics = EngineMetrics("made up", client.info)
        engine = AsyncEngine(client, model.create_tracker(client.info), metrics)
        service = Service(engine=engine, model=model, model_names=("made up",))
        listener = bind("127.0.0.1", 0)
        listener.listen(1024)
        sender.send(listener.getsockname()[1])

        async def run() -> None:
            server = Server(service, ServerSettings(), Credentials())
            server.install_signal_handlers()
            await server.run(listener)

        before_s = time.process_time()
        uvloop.run(run())
        sender.send(time.process_time() - before_s)
    finally:
        client.shutdown()


async def read_streams(port: int, num_clients: int, num_tokens: int) -> Totals:
    """Read all streams to their ends."""
    totals = Totals()
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    body = json.dumps({"prompt": [1_000] * 8, "max_tokens": num_tokens, "stream": True}).encode()
    create = partial(StreamReader, body, totals, num_clients, done)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(
            *(loop.create_connection(create, "127.0.0.1", port) for _ in range(num_clients))
        )
        await done.wait()
    return totals


class StreamReader(asyncio.Protocol):
    """One client, as cheap as it can be: it counts events and looks for the end."""

    def __init__(self, body: bytes, totals: Totals, num_clients: int, done: asyncio.Event) -> None:
        self._body, self._totals = body, totals
        self._num_clients, self._done = num_clients, done

    def connection_made(self, transport: Any) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        transport.write(f"{head}content-length: {len(self._body)}\r\n\r\n".encode() + self._body)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        totals = self._totals
        totals.last_s = time.perf_counter()
        totals.first_s = totals.first_s or totals.last_s
        totals.num_bytes += len(data)
        totals.num_events += data.count(b"data: {")
        if data.endswith(b"0\r\n\r\n"):
            totals.num_ended += 1
            self._transport.close()
            if totals.num_ended == self._num_clients:
                self._done.set()


class MadeUpCore:
    """A core that gives every request the next id in each step."""

    info = CoreInfo(
        max_tokens_per_request=65_536,
        max_model_len=65_536,
        num_blocks=100_000,
        block_size=16,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=1_024,
        max_num_batched_tokens=8_192,
        scheduling_policy="fcfs",
    )

    def __init__(self, step_time_s: float) -> None:
        self._step_time_s = step_time_s
        self._next_step_s = 0.0
        self._num_left: dict[int, int] = {}
        self._started: list[StartedRequest] = []
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._num_left)

    def apply(self, messages: Sequence[CoreMessage]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self._num_left[message.number] = message.max_tokens
                self._started.append(StartedRequest(message.number, time.monotonic(), 0))
            elif isinstance(message, AbortRequests):
                for number in message.numbers:
                    self._num_left.pop(number, None)

    def step(self) -> CoreOutputs | None:
        if not self._num_left:
            return None
        time.sleep(max(0.0, self._next_step_s - time.monotonic()))
        self._next_step_s = time.monotonic() + self._step_time_s
        self._step_id += 1
        numbers = list(self._num_left)
        token_id = FIRST_TOKEN_ID + self._step_id % 10_000
        self._num_left = {number: left - 1 for number, left in self._num_left.items() if left > 1}
        finished = [FinishedRequest(n, "length") for n in numbers if n not in self._num_left]
        started, self._started = self._started, []
        return CoreOutputs(
            numbers=numbers,
            token_ids=np.full(len(numbers), token_id, dtype="<i4").tobytes(),
            started=started,
            finished=finished,
            now_s=time.monotonic(),
            stats=CoreStats(num_running=len(numbers), num_tokens_scheduled=len(numbers)),
        )

    def prepare(self) -> bool:
        """Nothing can be prepared."""
        return False

    def shutdown(self) -> None:
        self._num_left.clear()


def report(case: str, num_clients: int, num_tokens: int, totals: Totals) -> None:
    """Print one JSON line."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    passed_s = totals.last_s - totals.first_s
    line = {
        "benchmark": "streaming",
        "case": case,
        "clients": num_clients,
        "tokens_per_stream": num_tokens,
        "tokens_per_s": round(num_clients * num_tokens / passed_s),
        "events_per_s": round(totals.num_events / passed_s),
        "tokens_per_event": round(num_clients * num_tokens / totals.num_events, 2),
        "api_process_us_per_token": round(1e6 * totals.cpu_s / (num_clients * num_tokens), 1),
        "seconds": round(passed_s, 1),
        "cores": os.cpu_count(),
        "commit": commit,
        "device": platform.processor() or platform.machine(),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
