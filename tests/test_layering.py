"""Imports point down, and the code that plans never loads torch."""

import ast
import subprocess
import sys

import pytest

from tests.source_tree import PACKAGES, ROOT, SOURCES, relative

LAYERS = [{"block_manager", "attention"}, {"models"}, {"executor"}, {"engine"}, {"entrypoints"}]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TORCH_FREE = [
    "octavo.block_manager",
    *(f"octavo.{path.stem}" for path in (ROOT / "src" / "octavo").glob("*.py")),
    *(f"octavo.block_manager.{path.stem}" for path in (ROOT / "block_manager").glob("*.py")),
    *(
        f"octavo.engine.{name}"
        for name in ("request", "policies", "scheduler", "journal", "core", "messages")
    ),
    "octavo.executor.step",
]


def imported_modules(tree):
    """Names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path):
    """Folders of octavo that a file imports from."""
    for name in imported_modules(SOURCES[path]):
        parts = name.split(".")
        if parts[0] == "octavo" and len(parts) > 1 and parts[1] in RANK:
            yield parts[1]


def test_every_package_has_a_layer():
    assert set(RANK) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package):
    bad = [
        f"{relative(path)} imports octavo.{name}"
        for path in SOURCES
        if relative(path).parts[0] == package
        for name in imported_packages(path)
        if name != package and RANK[name] >= RANK[package]
    ]
    assert not bad


def loaded_modules(start):
    """Names of all modules that importing ``start`` loads, as far as our own files say."""
    names = {f"octavo.{'.'.join(relative(path).with_suffix('').parts)}": path for path in SOURCES}
    found, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += imported_modules(SOURCES[names[name]]) if name in names else []
    return {name.partition(".")[0] for name in found}


@pytest.mark.parametrize(
    ("start", "forbidden"),
    [("entrypoints.openai.server", "torch"), ("entrypoints.launch", "transformers")],
)
def test_a_servers_processes_load_only_what_they_need(start, forbidden):
    loaded = loaded_modules(f"octavo.{start}")
    assert {"octavo", "numpy"} <= loaded
    assert forbidden not in loaded


def test_http_knows_nothing_of_the_api():
    bad = [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        if relative(path).parts[:2] == ("entrypoints", "http")
        for name in imported_modules(SOURCES[path])
        if name.startswith("octavo.entrypoints.openai")
    ]
    assert not bad


def test_only_the_tokenizers_loader_imports_transformers():
    """A start does without it until it has something to wait for."""
    importers = [
        str(relative(path))
        for path, tree in SOURCES.items()
        if any(name.split(".")[0] == "transformers" for name in imported_modules(tree))
    ]
    assert importers == ["engine/tokenizer_loader.py"]


def test_the_base_layer_imports_no_package():
    base = [path for path in SOURCES if relative(path).parts[0] == "src"]
    bad = [path.name for path in base if path.name != "__init__.py" and [*imported_packages(path)]]
    assert not bad


def test_type_checking_hides_no_cycle():
    escapes = [
        str(relative(path))
        for path, tree in SOURCES.items()
        if any(isinstance(n, ast.Name) and n.id == "TYPE_CHECKING" for n in ast.walk(tree))
    ]
    assert escapes == ["src/octavo/__init__.py"]


def test_planning_loads_no_torch():
    code = f"""
import importlib, sys
for name in {TORCH_FREE}:
    importlib.import_module(name)
print(*sorted({{"torch", "triton", "transformers"}} & set(sys.modules)))
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (loaded.stdout.strip(), loaded.stderr) == ("", "")
