"""``octavo demo`` as the README promises it."""

import contextlib
import os
import re
import subprocess
import sys

import psutil
import pytest

from octavo.entrypoints.cli.demo import QUESTIONS, Demo
from octavo.entrypoints.cli.http_client import HttpClient

MAIN = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"


def list_session(session_id):
    """Find the processes of a session."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            members += [process] if os.getsid(process.pid) == session_id else []
    return members


def test_figures_of_a_demo_are_those_of_the_server(server, capsys):
    demo = Demo(HttpClient(server.url))
    demo.run()
    demo.print_summary()
    answers, figures = capsys.readouterr().out.split("time to first token")
    assert answers.count(" [system]You are a helpful") == len(QUESTIONS)
    assert f"{64 * len(QUESTIONS)} tokens in" in figures
    assert "0 of them from the cache" in figures
    assert "of 1024" in figures
    assert not demo.has_failed


def test_refused_client_fails_the_demo(server, capsys, monkeypatch):
    monkeypatch.setattr("octavo.entrypoints.cli.demo.MAX_TOKENS", 0)
    demo = Demo(HttpClient(server.url))
    demo.run()
    assert demo.has_failed
    assert capsys.readouterr().out.count("[error: max_tokens is 0") == len(QUESTIONS)


@pytest.mark.slow
def test_demo_answers_and_leaves_no_process(smollm2):
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "demo"],
        env={**os.environ, "OCTAVO_DEFAULT_MODEL": str(smollm2)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert " INFO " not in output, "a line of the log may stand within an answer"
    assert "The capital of France is Paris." in output
    assert int(re.search(r"(\d+) of them from the cache", output)[1]) >= 48
    _, alive = psutil.wait_procs(list_session(process.pid), timeout=10)
    assert alive == []
