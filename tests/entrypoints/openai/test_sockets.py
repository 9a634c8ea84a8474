"""What can be reached of a server, what bytes do to it, and what a killed client leaves behind."""

import json
import os
import pickle
import random
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.entrypoints.openai.test_processes import ServeProcess
from tests.live_server import TIMEOUT_S, running_checkpoint

STREAMS = """
import socket, sys, time
port, request = int(sys.argv[1]), sys.argv[2].encode()
connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
for connection in connections:
    connection.sendall(request)
time.sleep(600)
"""


class TouchesFile:
    """Makes a file when somebody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def send_bytes(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        try:
            connection.sendall(data)
            connection.recv(1_000)
        except OSError:
            pass  # reset, or no answer to half a request


@pytest.mark.slow
def test_nothing_listens_but_the_port_and_no_byte_is_executed(tiny_spm, tmp_path):
    arguments = [tiny_spm, "--device", "cpu", "--num-gpu-blocks-override", "64"]
    with ServeProcess(*arguments) as served:
        port = served.peer.port
        processes = [psutil.Process(served.process.pid), *served.children()]
        assert len(processes) > 1
        for process in processes:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr == ("127.0.0.1", port)
            assert not [c for c in process.net_connections(kind="unix") if c.laddr]
        marker = tmp_path / "executed"
        bomb = pickle.dumps(TouchesFile(marker))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        noise = random.Random(0).randbytes(4_096)
        body = b"content-length: %d\r\n\r\n%b" % (len(bomb), bomb)
        for data in (bomb, head + body, noise, b"\x80\x04" + noise):
            send_bytes(port, data)
        assert served.peer.get("/health").status == 200
        reply = served.peer.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert reply.status == 200
        assert not marker.exists()
        assert len(served.children()) == len(processes) - 1
    assert "Traceback" not in served.log


def test_a_killed_client_leaves_no_number_behind(tiny_spm):
    data = json.dumps({"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n{data}"
    with running_checkpoint(tiny_spm, max_num_seqs=8) as server:
        command = [sys.executable, "-c", STREAMS, str(server.port), request]
        client = subprocess.Popen(command, env=os.environ)
        try:
            server.wait_for_metric("vllm:num_requests_running", 8)
            server.wait_until(lambda: server.metric("vllm:num_requests_waiting") > 0)
        finally:
            client.kill()
            client.wait(TIMEOUT_S)
        killed_s = time.monotonic()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            server.wait_for_metric(f"vllm:{name}", 0)
        assert time.monotonic() - killed_s < 5
        server.wait_for_metric("vllm:request_success_total", 20)
