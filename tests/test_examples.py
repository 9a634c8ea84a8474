"""The examples do what they say, with the default model."""

import os
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


def test_offline_example_completes_and_answers(smollm2):
    completed, counted, answered = run_example(
        "offline.py", OCTAVO_DEFAULT_MODEL=str(smollm2)
    ).splitlines()
    assert completed.startswith("'The capital of France is' -> ' Paris")
    assert counted == "'1, 2, 3, 4, 5,' -> ' 6, 7, 8, 9, 10, 11, 12,'"
    assert answered == "The capital of France is Paris."
