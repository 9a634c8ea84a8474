"""The client and the main loop of a core in another process: a real socket, a core that echoes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
import uvloop

from octavo.config import import_only_what_is_installed
from octavo.engine.channel import Channel
from octavo.engine.ipc_client import IpcClient
from octavo.engine.messages import AbortRequests, AddRequest, pack_ids, unpack_ids
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.step import RowSampling
from tests.echo_core import ECHO_INFO, EchoCore

ROOT = Path(__file__).parents[2]
NEVER = 10**9
TIMEOUT_S = 20
PARENT = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from octavo.engine.ipc_client import IpcClient
from tests.echo_core import EchoCore
client = IpcClient(EchoCore)
client.wait_until_ready()
print(client.pid, flush=True)
signal.pause()
"""


def refuse_to_start():
    raise ConfigError("block_size is 0; it must be at least 1")


class BrokenDeviceCore(EchoCore):
    """Dies on "crash", and its device cannot be freed after that."""

    def shutdown(self):
        raise OSError("the device is gone")


def make_request(number=1, *, request_id="r", prompt=(5, 6, 7), max_tokens=4):
    return AddRequest(
        number=number,
        request_id=request_id,
        prompt=pack_ids(list(prompt)),
        sampling=RowSampling(seed=0),
        max_tokens=max_tokens,
        arrival_s=0.0,
    )


@pytest.fixture
def client(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # the spawned process imports this file
    client = IpcClient(EchoCore)
    client.wait_until_ready()
    yield client
    client.shutdown()


def test_core_announces_itself_and_answers(client):
    client.send([make_request(prompt=(5, 6, 7), max_tokens=4)])
    tokens = []
    for _ in range(4):
        outputs = client.receive()
        tokens += unpack_ids(outputs.token_ids).tolist()
    assert client.info == ECHO_INFO
    assert tokens == [5, 6, 7, 5]
    assert [(end.number, end.reason) for end in outputs.finished] == [(1, "length")]


def test_files_of_the_working_folder_are_not_imported_for_modules(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the working folder was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    import_only_what_is_installed()
    client = IpcClient(EchoCore)
    client.wait_until_ready()
    client.shutdown()


def test_messages_are_applied_in_order(client):
    client.send([make_request(1, max_tokens=NEVER), make_request(2, max_tokens=NEVER)])
    client.send([AbortRequests((1, 2)), make_request(3, max_tokens=1)])
    outputs = client.receive()
    while not any(end.number == 3 for end in outputs.finished):
        outputs = client.receive()
    assert outputs.stats.num_running == 0


def test_idle_core_uses_no_processor_time(client):
    client.send([make_request(max_tokens=1)])
    client.receive()
    process = psutil.Process(client.pid)
    before = sum(process.cpu_times()[:2])
    with pytest.raises(psutil.TimeoutExpired):
        process.wait(timeout=0.3)
    assert sum(process.cpu_times()[:2]) - before < 0.15, "one that spins takes 0.3 s"


def test_exception_in_the_core_reaches_the_client(client):
    client.send([make_request(request_id="crash")])
    with pytest.raises(EngineDeadError, match="RuntimeError: crash on demand"):
        client.receive()


def test_killed_core_is_noticed_by_both_directions(client):
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        client.receive()
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        client.send([make_request()])


def test_signals_of_the_process_group_do_not_end_the_core(client):
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    client.send([make_request(max_tokens=1)])
    assert client.receive().finished


def test_refused_setting_is_a_config_error(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    client = IpcClient(refuse_to_start)
    with pytest.raises(ConfigError, match="block_size is 0"):
        client.wait_until_ready()
    client.shutdown()


def test_last_word_of_a_core_is_heard_after_its_end_was_seen(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    client = IpcClient(refuse_to_start)
    assert wait([client._process.sentinel], TIMEOUT_S)
    with pytest.raises(ConfigError, match="block_size is 0"):
        client.wait_until_ready()
    client.shutdown()


def test_unreadable_message_is_the_end(client):
    ours, theirs = (Channel(end) for end in socket.socketpair())
    client._channel.close()
    client._channel = ours
    theirs.send(b"no message")
    with pytest.raises(EngineDeadError, match="cannot be read"):
        client.receive()
    theirs.close()


def test_device_that_cannot_be_freed_does_not_hide_why_the_core_died(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    client = IpcClient(BrokenDeviceCore)
    client.wait_until_ready()
    client.send([make_request(request_id="crash")])
    with pytest.raises(EngineDeadError, match="RuntimeError: crash on demand"):
        client.receive()
    client.shutdown()


def test_shutdown_leaves_no_process_and_no_socket(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    resource_tracker.ensure_running()  # it stays, and has a pipe of its own
    num_open = psutil.Process().num_fds()
    client = IpcClient(partial(EchoCore, step_time_s=0.001))
    client.wait_until_ready()
    client.send([make_request(max_tokens=NEVER)])
    client.receive()
    client.shutdown()
    client.shutdown()
    assert not psutil.pid_exists(client.pid)
    with pytest.raises(EngineDeadError):
        client.receive()
    with pytest.raises(EngineDeadError):
        client.send([])
    client._process.close()  # it keeps a pipe for its sentinel
    assert psutil.Process().num_fds() == num_open


def test_killed_parent_leaves_no_core():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ROOT], stdout=subprocess.PIPE)
    with parent:
        core = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    core.wait(timeout=10)


async def listen(client):
    """Listen on this event loop; returns what is heard of outputs, and of the end."""
    outputs, end = asyncio.Queue(), asyncio.get_running_loop().create_future()
    client.listen(outputs.put_nowait, end.set_result)
    return outputs, end


def run(scenario, loop_factory):
    async def run_in_time():
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run_in_time())


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request):
    return request.param


def test_event_loop_hears_outputs_and_then_why_the_core_died(client, loop_factory):
    async def scenario():
        outputs, end = await listen(client)
        client.send([make_request(max_tokens=2)])
        token_ids = [unpack_ids((await outputs.get()).token_ids).tolist() for _ in range(2)]
        assert token_ids == [[5], [6]]
        client.send([make_request(request_id="crash")])
        assert await end == "RuntimeError: crash on demand"
        with pytest.raises(EngineDeadError, match="status 1"):
            client.send([make_request()])

    run(scenario, loop_factory)


def test_event_loop_hears_of_a_killed_core(client, loop_factory):
    async def scenario():
        _, end = await listen(client)
        os.kill(client.pid, signal.SIGKILL)
        assert await end == "the engine core process ended with status -9"

    run(scenario, loop_factory)


def test_event_loop_hears_nothing_after_hanging_up(client, loop_factory):
    async def scenario():
        outputs, end = await listen(client)
        client.send([make_request(max_tokens=NEVER)])
        await outputs.get()
        client.hang_up()
        await asyncio.to_thread(client.shutdown)
        assert not end.done()

    run(scenario, loop_factory)


def test_messages_larger_than_a_socket_takes_do_not_block_the_event_loop(client, loop_factory):
    prompt = list(range(10**6))

    async def scenario():
        outputs, _ = await listen(client)
        os.kill(client.pid, signal.SIGSTOP)
        client.send([make_request(prompt=prompt, max_tokens=3)])
        client.send([make_request(2, max_tokens=1)])
        assert client._channel.has_unsent
        os.kill(client.pid, signal.SIGCONT)
        numbers = [number for _ in range(3) for number in (await outputs.get()).numbers]
        assert sorted(numbers) == [1, 1, 1, 2]
        assert not client._channel.has_unsent

    run(scenario, loop_factory)
