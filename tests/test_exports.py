"""``import octavo`` is light, and its names are exactly the public ones."""

import ast
import importlib
import subprocess
import sys

import pytest

import octavo
from tests.source_tree import ROOT, SOURCES

INIT = SOURCES[ROOT / "src" / "octavo" / "__init__.py"]
HEAVY = "{'torch', 'triton', 'transformers', 'fastapi'}"


def public_classes(module_name):
    """Classes that a module defines and does not mark as its own."""
    module = importlib.import_module(module_name)
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module_name and name[0] != "_"
    }


def loaded_by(code):
    """Heavy modules that a fresh interpreter has loaded after running the code."""
    code = f"{code}\nimport sys; print(*sorted({HEAVY} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_name_can_be_imported(name):
    assert isinstance(getattr(octavo, name), type)


def test_names_are_sorted_and_complete():
    assert octavo.__all__ == sorted(octavo.__all__, key=lambda name: (not name.isupper(), name))
    modules = ("octavo.errors", "octavo.outputs", "octavo.sampling_params")
    assert set(octavo.__all__) == {"LLM"}.union(*map(public_classes, modules))


def test_type_checkers_and_the_interpreter_see_the_same_names():
    hints = [node for node in ast.walk(INIT) if isinstance(node, ast.ImportFrom)]
    names = [
        alias.name for node in hints if node.module.startswith("octavo") for alias in node.names
    ]
    assert sorted(names) == sorted(octavo.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = octavo.nothing


def test_importing_octavo_loads_nothing_heavy():
    assert loaded_by("import octavo; octavo.SamplingParams; octavo.ConfigError") == ""


def test_help_loads_nothing_heavy():
    code = """
import contextlib, sys
from octavo.entrypoints.cli.main import main
sys.argv = ["octavo", "--help"]
with contextlib.suppress(SystemExit):
    main()
"""
    assert loaded_by(code) == ""
