"""Servers and cores as processes: who dies, who notices, what is said, and what is left."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection

import psutil
import pytest

from octavo.engine.ipc_client import IpcClient
from tests.echo_core import EchoCore
from tests.live_server import TIMEOUT_S, Peer, running_server
from tests.source_tree import ROOT

LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}
MAIN = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"
START_TIMEOUT_S = 120


class ServeProcess:
    """``octavo serve`` as a user runs it, in a process group of its own as in a terminal."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "serve", *_choose_port(arguments), *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.log = ""
        self.peer = None
        self._line = threading.Condition()
        self._is_settled = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self):
        assert self._is_settled.wait(START_TIMEOUT_S), self.log
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def children(self):
        """The processes that belong to the server."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self):
        """Wait for the end and return the exit status."""
        status = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status

    def wait_for_log(self, text):
        """Wait until the server has said something."""
        with self._line:
            assert self._line.wait_for(lambda: text in self.log, TIMEOUT_S), self.log

    def _read(self):
        with self.process.stderr as lines:
            for line in lines:
                with self._line:
                    self.log += line
                    self._line.notify_all()
                if found := re.search(r"serving .* at (?:unix:|https?://[0-9.]+:)(.+)", line):
                    address = found[1].strip()
                    self.peer = Peer(int(address)) if address.isdigit() else UnixPeer(address)
                    self._is_settled.set()
        self._is_settled.set()


def _choose_port(arguments):
    return [] if "--uds" in arguments else ["--port", "0"]


@dataclass
class UnixPeer(Peer):
    """A server at a socket in the file system, which stands in the place of its port."""

    def connect(self):
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(self.port)
        return connection


@pytest.fixture
def small(tiny_spm):
    """Arguments of a server that starts fast."""
    return [tiny_spm, "--device", "cpu", "--num-gpu-blocks-override", "64"]


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert alive == []


def test_killed_core_ends_requests_and_the_server(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    client = IpcClient(partial(EchoCore, step_time_s=0.005))
    client.wait_until_ready()
    with running_server(client=client) as server:
        collect = server.start_posts("/v1/completions", LONG | {"stream": True}, LONG)
        server.wait_for_metric("vllm:num_requests_running", 2)
        os.kill(client.pid, signal.SIGKILL)
        stream, plain = collect()
        assert server.get("/health").status == 503
        assert server.post("/v1/completions", LONG).status == 503
        server.thread.join(TIMEOUT_S)
    assert "status -9" in stream.events[-1]["error"]["message"]
    assert (plain.status, plain.json["error"]["code"]) == (503, 503)
    assert server.status == 1


def test_sigterm_ends_a_server_and_everything_of_it(small):
    with ServeProcess(*small) as served:
        children = served.children()
        collect = served.peer.start_posts("/v1/completions", LONG | {"stream": True}, LONG)
        served.peer.wait_for_metric("vllm:num_requests_running", 2)
        served.process.send_signal(signal.SIGTERM)
        stream, plain = collect()
        assert served.wait() == 0
        assert_gone(children)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", served.peer.port))
    assert stream.events[-1]["choices"][0]["finish_reason"] == "abort"
    assert plain.json["choices"][0]["finish_reason"] == "abort"
    assert "Traceback" not in served.log


@pytest.mark.slow
def test_server_at_a_path_answers_and_takes_the_path_with_it(small, tmp_path):
    path = tmp_path / "octavo.sock"
    with ServeProcess(*small, "--uds", path, "--api-key", "sk-secret") as served:
        reply = served.peer.post("/v1/completions", SHORT, {"authorization": "Bearer sk-secret"})
        assert reply.status == 200
        assert served.peer.post("/v1/completions", SHORT).status == 401
        with ServeProcess(*small, "--uds", path) as second:
            assert second.wait() == 2
        assert "which cannot be used: a server has it" in second.log
        assert path.is_socket()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
    assert not path.exists()
    assert "sk-secret" not in served.log
    assert "Traceback" not in served.log


@pytest.mark.slow
def test_log_tells_requests_and_load(small):
    options = ["--enable-log-requests", "--disable-access-log-for-endpoints", "/health"]
    with ServeProcess(*small, *options, "--host", "0.0.0.0") as served:
        served.wait_for_log("there are no API keys")
        assert served.peer.get("/health").status == 200
        served.peer.post("/v1/completions", SHORT, {"x-request-id": "mine"})
        served.wait_for_log("request cmpl-mine begins: 3 prompt tokens")
        served.wait_for_log("request cmpl-mine ends (length)")
        served.wait_for_log("KV cache usage: 0.0%")
    assert '"POST /v1/completions HTTP/1.1" 200' in served.log
    assert '"GET /health' not in served.log


@pytest.mark.slow
def test_ctrl_c_reaches_the_whole_group_and_prints_no_traceback(small):
    with ServeProcess(*small) as served:
        children = served.children()
        os.killpg(served.process.pid, signal.SIGINT)
        assert served.wait() == 0
        assert_gone(children)
    assert "Traceback" not in served.log


@pytest.mark.slow
def test_second_sigterm_does_not_wait_for_requests(small):
    with ServeProcess(*small, "--shutdown-timeout", "600") as served:
        children = served.children()
        collect = served.peer.start_posts("/v1/completions", LONG, LONG)
        served.peer.wait_for_metric("vllm:num_requests_running", 2)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_log("ending: 2 requests")  # two pending signals would be one
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 1
        assert_gone(children)
        collect()
    assert "the engine died" not in served.log


@pytest.mark.slow
def test_killed_core_of_a_real_server_is_noticed(small):
    with ServeProcess(*small) as served:
        (core,) = (child for child in served.children() if "spawn_main" in str(child.cmdline()))
        collect = served.peer.start_posts("/v1/completions", LONG | {"stream": True}, LONG)
        served.peer.wait_for_metric("vllm:num_requests_running", 2)
        core.kill()
        stream, plain = collect()
        assert served.wait() == 1
    assert "error" in stream.events[-1]
    assert plain.status == 503


@pytest.mark.slow
def test_killed_server_leaves_no_core(small):
    with ServeProcess(*small) as served:
        children = served.children()
        served.process.kill()
        served.wait()
        assert_gone(children)


@pytest.mark.slow
def test_sigterm_while_loading_ends_cleanly(small):
    served = ServeProcess(*small)
    served.process.send_signal(signal.SIGTERM)
    assert served.wait() in (0, -signal.SIGTERM)  # Python itself may not be up yet
    assert "Traceback" not in served.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-folder/model"], "no-such-folder"),
        (["--block-size", "0"], "block_size is 0"),
        (["--max-model-len", "4096", "--num-gpu-blocks-override", "1"], "max_model_len"),
    ],
)
def test_start_that_cannot_succeed_is_one_sentence_and_status_two(tiny_spm, arguments, sentence):
    model = [] if arguments[0].startswith("no-such") else [tiny_spm]
    with ServeProcess(*model, *arguments) as served:
        assert served.wait() == 2
    assert sentence in served.log
    assert "Traceback" not in served.log
