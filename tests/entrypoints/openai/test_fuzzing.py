"""Requests made from the OpenAPI document: none is answered otherwise than the document says."""

import importlib.util
import subprocess
import sys

import pytest

from tests.entrypoints.openai.test_soak import check_nothing_is_left, count_tasks
from tests.live_server import running_checkpoint

SECONDS = 60
CHECKS_LEFT_OUT = "positive_data_acceptance"
"""A schema cannot say everything: how long a prompt may be, which fields exclude each other."""
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "504"]  # a request may set itself a time that is too short
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="NOT TESTED: no schemathesis here"
)
@pytest.mark.parametrize("seed", [1])
def test_generated_requests_find_no_fault(tiny_spm, tmp_path, seed):
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    options = ["--checks", "all", "--exclude-checks", CHECKS_LEFT_OUT]
    options += ["--phases", "coverage,fuzzing", "--continue-on-failure", "--request-timeout", "20"]
    options += ["--suppress-health-check", "all", "--max-time", str(SECONDS), "--seed", str(seed)]
    with running_checkpoint(tiny_spm, max_model_len=96) as server:
        num_tasks = count_tasks(server)
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
        run = subprocess.run(
            [*command, f"{server.url}/openapi.json", *options],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        print(run.stdout, run.stderr)
        assert run.returncode == 0
        assert " 0 generated" not in run.stdout
        check_nothing_is_left(server, num_tasks)
        assert server.get("/health").status == 200
