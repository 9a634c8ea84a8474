"""The client and the main loop of a core in another process: real sockets, a core that echoes."""

import os
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
import zmq

from octavo.engine.ipc_client import IpcClient
from octavo.engine.messages import AbortRequests, AddRequest, pack_ids, unpack_ids
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.step import RowSampling
from tests.echo_core import ECHO_INFO, EchoCore

ROOT = Path(__file__).parents[2]
NEVER = 10**9
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


class EndFirstPoller(zmq.Poller):
    """Sees the end of a process before its last message, which may overtake it."""

    def poll(self, timeout=None):
        ends = [end for end, _ in self.sockets if isinstance(end, int)]
        return [(end, zmq.POLLIN) for end in wait(ends)]


class LateSocket(zmq.Socket):
    """Has nothing for those who do not wait."""

    def poll(self, timeout=None, flags=zmq.POLLIN):
        return 0 if timeout == 0 else super().poll(timeout, flags)


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
    assert sum(process.cpu_times()[:2]) - before <= 0.05


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
    monkeypatch.setattr(zmq, "Poller", EndFirstPoller)
    monkeypatch.setattr(zmq.Context, "_socket_class", LateSocket)
    client = IpcClient(refuse_to_start)
    with pytest.raises(ConfigError, match="block_size is 0"):
        client.wait_until_ready()
    client.shutdown()


def test_device_that_cannot_be_freed_does_not_hide_why_the_core_died(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    client = IpcClient(BrokenDeviceCore)
    client.wait_until_ready()
    client.send([make_request(request_id="crash")])
    with pytest.raises(EngineDeadError, match="RuntimeError: crash on demand"):
        client.receive()
    client.shutdown()


def test_core_that_dies_during_shutdown_is_cleaned_up(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = IpcClient(EchoCore)
    client.wait_until_ready()
    process = psutil.Process(client.pid)
    process.kill()
    with pytest.raises(EngineDeadError):
        client.receive()
    answers = iter([True])  # it was alive when it was asked first
    monkeypatch.setattr(client._process, "is_alive", lambda: next(answers, False))
    client.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_shutdown_leaves_no_process_and_no_socket(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = IpcClient(partial(EchoCore, step_time_s=0.001))
    client.wait_until_ready()
    client.send([make_request(max_tokens=NEVER)])
    client.receive()
    client.shutdown()
    assert not psutil.pid_exists(client.pid)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineDeadError):
        client.receive()


def test_killed_parent_leaves_no_core_and_no_socket(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, ROOT],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    with parent:
        core = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    core.wait(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_socket_folder_is_private(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = IpcClient(EchoCore)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    client.shutdown()
