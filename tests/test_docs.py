"""The documents name what exists, and their examples are the ones that are tested."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from tests.source_tree import ROOT, SOURCES

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def code_blocks(text, language):
    """Contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def names_in(path):
    """Every function, class and method of a file, methods as ``Class.method``."""
    names = set()
    for node in SOURCES[path].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (item for item in node.body if isinstance(item, ast.stmt))
            names |= {
                f"{node.name}.{item.name}"
                for item in members
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    assert not [target for target in targets if not (document.parent / target).exists()]


def test_documents_that_the_code_refers_to_exist():
    named = {name for path in SOURCES for name in re.findall(r"docs/\w+\.md", path.read_text())}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_compiles(document):
    for block in code_blocks(document.read_text(encoding="utf-8"), "python"):
        compile(block, document.name, "exec")


@pytest.mark.parametrize("example", ["offline.py", "chat_client.py"])
def test_readme_shows_the_tested_examples(example):
    source = (ROOT / "examples" / example).read_text(encoding="utf-8")
    without_docstring = source.split("\n\n", 1)[1]
    assert without_docstring in code_blocks(README, "python")


def test_every_example_is_run_by_ci():
    tests = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert len(names) >= 4
    assert not [name for name in names if f'"{name}"' not in tests]
    assert "tests/test_examples.py" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_commands_of_the_readme_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("--quiet ", "")
    first = re.search(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL).group(1)
    commands = [part.split("#")[0].strip() for part in re.split(r"\n|&&", first) if part.strip()]
    assert len(commands) == 4
    assert not [command for command in commands if f"step {command}\n" not in ci]


def test_readme_quotes_the_first_table_of_the_benchmarks():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = re.search(r"^\|.*?\n\n", text, re.MULTILINE | re.DOTALL).group()
    assert table in README


def test_readme_installs_the_pinned_torch():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert re.search(r"pip install (torch==\S+)", README).group(1) in pins


def test_every_setting_is_documented():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert not [setting.name for setting in fields(EngineConfig) if setting.name not in text]


def test_architecture_names_what_exists():
    places = re.findall(r"`([a-z_/]+\.py):([A-Za-z_.]+)`", ARCHITECTURE)
    assert len(places) > 20
    missing = [
        f"{file}:{name}"
        for file, name in places
        if ROOT / file not in SOURCES or name not in names_in(ROOT / file)
    ]
    assert not missing


def test_architecture_names_only_folders_and_files_that_exist():
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py|\.md)?)`", ARCHITECTURE)
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(("name", "limit"), [("ARCHITECTURE.md", 200), ("CONTRIBUTING.md", 60)])
def test_a_document_that_must_stay_short_is_short(name, limit):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


def test_decisions_have_their_three_parts():
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Choice", "Price"], path.name


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.name[:4]) for path in sorted(Path(ROOT, "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
