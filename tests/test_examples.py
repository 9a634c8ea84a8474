"""The examples do what they say, with the default model."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

pytestmark = pytest.mark.slow


def run_example(name, *arguments, **environment):
    """Run one example as a user would and return what it prints."""
    command = [] if name.endswith(".sh") else [sys.executable]
    process = subprocess.run(
        [*command, ROOT / "examples" / name, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def server(smollm2):
    """Address of a server with the default model, started as the README says."""
    command = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--port", "0", "--no-access-log"],
        env={**os.environ, "OCTAVO_DEFAULT_MODEL": str(smollm2)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        log = []
        for line in process.stderr:
            log.append(line)
            if address := re.search(r"http://\S+", line):
                yield address.group()
                break
        process.terminate()
        log += process.stderr
    assert process.returncode == 0, "".join(log)


def test_offline_example_completes_and_answers(smollm2):
    completed, counted, answered = run_example(
        "offline.py", OCTAVO_DEFAULT_MODEL=str(smollm2)
    ).splitlines()
    assert completed.startswith("'The capital of France is' -> ' Paris")
    assert counted == "'1, 2, 3, 4, 5,' -> ' 6, 7, 8, 9, 10, 11, 12,'"
    assert answered == "The capital of France is Paris."


def test_chat_example_answers(server):
    assert run_example("chat_client.py", f"{server}/v1") == "The capital of France is Paris.\n"


def test_streaming_example_prints_what_it_is_asked_for(server):
    assert run_example("streaming.py", f"{server}/v1").startswith("1. 1\n2. 2\n3. 3\n")


def test_curl_example_completes(server):
    assert json.loads(run_example("curl.sh", server))["choices"][0]["text"].startswith(" Paris")
