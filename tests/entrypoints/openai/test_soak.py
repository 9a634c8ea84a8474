"""Clients that come and go as they like: nothing is stuck and nothing is left behind."""

import asyncio
import json
import random
import time

import psutil
import pytest

from octavo.config import EngineConfig, Environment
from octavo.entrypoints.processes import start_core_process
from octavo.entrypoints.served_model import load_served_model
from octavo.models.source import resolve_source
from tests.live_server import TIMEOUT_S, running_checkpoint, running_server

MAX_GROWTH_BYTES = 64 * 2**20
PATIENCE_S = 60
"""No request takes that long on any machine, unless it is stuck."""


class Client:
    """Sends requests over raw connections and leaves most of them early."""

    def __init__(self, port, seed):
        self.num_finished = 0
        self.num_left = 0
        self._port = port
        self._random = random.Random(seed)

    async def run(self, deadline):
        while time.monotonic() < deadline:
            async with asyncio.timeout(PATIENCE_S):
                await self._ask()

    async def _ask(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            data, is_streamed = self._choose_body()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            end = "" if is_streamed else "connection: close\r\n"  # of its one line
            writer.write(f"{head}{end}content-length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            await self._read(reader, is_streamed)
        finally:
            if self._random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _read(self, reader, is_streamed):
        """Read to the end, or some lines, or nothing at all."""
        patience = self._random.choice([0, 1, 3, 10, None])
        if patience == 0:
            self.num_left += 1
            return
        status = await reader.readline()
        assert b" 200 " in status, status
        num_lines = 0
        while line := await reader.readline():
            num_lines += 1
            if line == b"data: [DONE]\n" or (not is_streamed and b'"choices"' in line):
                self.num_finished += 1
                return
            if patience is not None and num_lines > 5 + patience:
                self.num_left += 1
                return

    def _choose_body(self):
        choose = self._random
        is_streamed = choose.random() < 0.8
        body = {
            "prompt": choose.choices(range(5, 300), k=choose.choice([3, 20, 60])),
            "max_tokens": choose.choice([1, 5, 30, 100]),
            "n": choose.choice([1, 1, 1, 2]),
            "stop": choose.choice([None, ["a", "bc"]]),
            "stream": is_streamed,
        }
        return json.dumps(body).encode(), is_streamed


def run_clients(port, num_clients, seconds):
    """Let all clients loose and return them."""
    clients = [Client(port, seed) for seed in range(num_clients)]

    async def run_all():
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(client.run(deadline) for client in clients))

    asyncio.run(run_all())
    return clients


def count_tasks(server):
    async def count():
        return len(asyncio.all_tasks())

    return server.call(count())


def check_nothing_is_left(server, num_tasks):
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for_metric(f"vllm:{name}", 0)
    assert server.service.engine.num_open_requests == 0
    deadline = time.monotonic() + TIMEOUT_S
    while count_tasks(server) > num_tasks:
        assert time.monotonic() < deadline, "tasks of the server do not end"
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200


def measure_memory(processes):
    return [process.memory_info().rss for process in processes]


def soak(server, num_clients, seconds, *, processes):
    run_clients(server.port, num_clients, max(1, seconds / 3))  # what stays, is allocated now
    num_tasks, memory = count_tasks(server), measure_memory(processes)
    clients = run_clients(server.port, num_clients, seconds)
    check_nothing_is_left(server, num_tasks)
    assert sum(client.num_finished for client in clients) > num_clients / 2
    assert sum(client.num_left for client in clients) > num_clients / 2
    for before, after in zip(memory, measure_memory(processes), strict=True):
        assert after - before < MAX_GROWTH_BYTES


def test_clients_that_come_and_go_leave_nothing_behind(tiny_spm):
    with running_checkpoint(tiny_spm) as server:
        soak(server, num_clients=10, seconds=0.5, processes=[psutil.Process()])
        scheduler = server.core.scheduler
        assert scheduler.block_manager.pool.num_used == 0
        assert not scheduler.requests


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"async_scheduling": True}, {"max_num_seqs": 4}])
def test_many_clients_for_long_leave_nothing_behind(tiny_spm, settings):
    with running_checkpoint(tiny_spm, **settings) as server:
        soak(server, num_clients=200, seconds=60, processes=[psutil.Process()])


@pytest.mark.slow
def test_hundred_clients_of_another_process_leave_nothing_behind(tiny_spm):
    config = EngineConfig(model=str(tiny_spm), device="cpu", num_gpu_blocks_override=256)
    environment = Environment.read()
    model = load_served_model(config, resolve_source(config, environment), environment)
    client = start_core_process(config, model.source)
    client.wait_until_ready()
    with running_server(client=client, model=model) as server:
        processes = [psutil.Process(), psutil.Process(client.pid)]
        soak(server, num_clients=100, seconds=30, processes=processes)
