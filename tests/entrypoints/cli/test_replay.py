"""A journal that ``--journal`` wrote is replayed from the command line."""

from octavo.engine.core import EngineCore
from octavo.engine.journal import Journal
from octavo.entrypoints.cli.main import main
from tests.engine.requests import make_add, make_config
from tests.fake_executor import FakeExecutor


def write_journal(path):
    config = make_config()
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=config.max_num_seqs)
    core = EngineCore(executor, config, lag=0, journal=Journal(config, sink=path.open("wb")))
    core.apply([make_add(number, 9, max_tokens=4) for number in range(3)])
    while core.has_work:
        core.step()
    core.shutdown()


def test_a_journal_is_replayed(tmp_path, capsys):
    write_journal(tmp_path / "journal.jsonl")
    assert main(["replay", str(tmp_path / "journal.jsonl")]) == 0
    assert "all decisions equal" in capsys.readouterr().out


def test_a_cut_journal_is_an_error_that_names_the_line(tmp_path, capsys):
    path = tmp_path / "journal.jsonl"
    write_journal(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["replay", str(path)]) == 1
    assert "is cut or damaged in line" in capsys.readouterr().err


def test_a_missing_journal_is_the_callers_mistake(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "there is no file" in capsys.readouterr().err
