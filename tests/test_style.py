"""Rules of the code that no linter knows."""

import ast
import re

from tests.source_tree import ROOT, SOURCES, relative

MAX_LINES = 500
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
PROCESSES = (
    r"((API|Core|Engine-core|Template) process( and engine-core process)?|No process of its own): "
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?! \(#\d+\))")
SILENCED = re.compile(r"# (noqa|type: ignore)(: ?[A-Z0-9, ]+|\[[a-z, -]+\])?\s*$")

FOLDERS = ("tests", "benchmarks", "examples")
ALL_FILES = [*SOURCES, *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py")))]


def lines_with(pattern, files):
    """``file:line`` of every match."""
    return [
        f"{relative(path)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def nodes(kind):
    """Every syntax node of one kind in the package, with its file."""
    return [
        (relative(path), node)
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, kind)
    ]


def test_no_file_is_longer_than_a_sitting():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in ALL_FILES}
    long = {str(p): n for p, n in lengths.items() if n > MAX_LINES and "ops" not in p.parts}
    assert not long


def test_every_file_is_named_after_what_it_holds():
    assert not [relative(path) for path in ALL_FILES if path.stem in VAGUE_NAMES]


def test_the_block_manager_is_the_only_manager():
    managers = [node.name for _, node in nodes(ast.ClassDef) if node.name.endswith("Manager")]
    assert managers == ["BlockManager"]


def test_no_attribute_is_guessed():
    guesses = [
        f"{path}:{node.lineno}"
        for path, node in nodes(ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3
    ]
    assert not guesses


def test_broad_excepts_say_why_they_stand_at_a_border():
    broad = re.compile(r"except (Base)?Exception( as \w+)?:\s*$|except:")
    assert not lines_with(broad, SOURCES)


def test_nothing_is_left_to_do():
    others = [path for path in ALL_FILES if path.name != "test_style.py"]
    assert not lines_with(UNFINISHED, others)


def test_silenced_rules_carry_a_reason():
    assert not lines_with(SILENCED, ALL_FILES)


def test_only_the_configuration_reads_the_environment():
    reads = re.compile(r"os\.(environ|getenv)")
    readers = {line.rsplit(":", 1)[0] for line in lines_with(reads, SOURCES)}
    assert readers == {"src/octavo/config.py"}


def test_nothing_is_unpickled():
    loads = re.compile(r"\b(pickle|cloudpickle|recv_pyobj)\b|torch\.load")
    assert not lines_with(loads, SOURCES)


def docstring_of(path):
    """The module's docstring, or nothing."""
    return ast.get_docstring(SOURCES[path]) or ""


def test_a_module_says_what_it_is_in_six_lines():
    wordy = {}
    for path in SOURCES:
        lines = [line for line in docstring_of(path).splitlines() if line]
        prose = [line for line in lines if line[0] not in "├│└"]
        if not 1 <= len(prose) <= 6 and "ops" not in path.parts:  # kernels draw their tiles
            wordy[str(relative(path))] = len(prose)
    assert not wordy


def test_engine_files_name_their_process():
    files = [path for path in SOURCES if path.parent == ROOT / "engine"]
    silent = [path.name for path in files if not re.match(PROCESSES, docstring_of(path))]
    assert silent == ["__init__.py"]
