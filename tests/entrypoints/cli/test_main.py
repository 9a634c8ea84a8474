import subprocess
import sys

import pytest

import octavo
from octavo.entrypoints.cli import main as cli
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError


class Command:
    """Stands for a sub-command's module."""

    def __init__(self, error=None):
        self.error = error

    def add_arguments(self, parser):
        parser.add_argument("--size", type=int, default=0)

    def run(self, args):
        if self.error is not None:
            raise self.error
        return args.size


@pytest.fixture
def use_command(monkeypatch):
    def use(command):
        monkeypatch.setattr(cli, "COMMANDS", {"work": "does work"})
        monkeypatch.setattr(cli, "import_module", lambda name: command)

    return use


def test_command_decides_the_exit_status(use_command):
    use_command(Command())
    assert cli.main(["work"]) == 0
    assert cli.main(["work", "--size", "3"]) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("block_size is 0"), 2),
        (InvalidRequestError("prompt is empty"), 2),
        (EngineDeadError("the core died"), 1),
    ],
)
def test_error_is_one_sentence_and_an_exit_status(use_command, capsys, error, status):
    use_command(Command(error))
    assert cli.main(["work"]) == status
    assert capsys.readouterr().err == f"octavo: {error}\n"


def test_interrupt_ends_quietly(use_command, capsys):
    use_command(Command(KeyboardInterrupt()))
    assert cli.main(["work"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["work", "--size", "x"]])
def test_wrong_command_line_exits_with_2(use_command, arguments, capsys):
    use_command(Command())
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo")
    assert error.count("\n") == 1


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_reader_that_has_seen_enough_ends_the_command_quietly():
    code = "import sys; from octavo.entrypoints.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--help=all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 130


@pytest.mark.parametrize("length", [1, 100_000])
def test_output_that_cannot_be_written_is_one_sentence_and_status_1(length):
    code = f"""
import sys
from types import SimpleNamespace
from octavo.entrypoints.cli import main as cli
cli.COMMANDS = {{"work": "does work"}}
command = SimpleNamespace(add_arguments=id, run=lambda args: print("x" * {length}) or 0)
cli.import_module = lambda name: command
sys.exit(cli.main(["work"]))
"""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (result.stderr, result.returncode) == ("octavo: No space left on device\n", 1)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_without_standard_streams(closed, tmp_path):
    code = f"""
import socket, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from octavo.entrypoints.cli import main as cli

def run(args):
    print("text", flush=True)
    print("text", file=sys.stderr)
    subprocess.run(["echo", "text"], check=True)
    with socket.socket() as connection:
        Path({str(tmp_path / "number")!r}).write_text(str(connection.fileno()))
    return 0

cli.COMMANDS = {{"work": "does work"}}
cli.import_module = lambda name: SimpleNamespace(add_arguments=id, run=run)
sys.exit(cli.main(["work"]))
"""
    command = f'exec "$0" -c "$1" {closed}'
    result = subprocess.run(["sh", "-c", command, sys.executable, code], capture_output=True)
    assert result.returncode == 0, result.stderr
    assert int((tmp_path / "number").read_text()) > 2


@pytest.mark.parametrize("name", [None, "generate", "serve"])
def test_help_loads_nothing_heavy(name):
    arguments = ["--help"] if name is None else [name, "--help"]
    code = (
        "import sys\nfrom octavo.entrypoints.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "usage: octavo" in result.stdout
