import re

from octavo.entrypoints.cli.reference import render_configuration
from tests.source_tree import ROOT


def test_the_document_is_up_to_date():
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = "python -m octavo.entrypoints.cli.reference > docs/configuration.md"
    assert document == render_configuration(), f"run {command}"


def test_every_environment_variable_is_documented():
    config = (ROOT / "src" / "octavo" / "config.py").read_text(encoding="utf-8")
    names = set(re.findall(r"OCTAVO_\w+", config))
    assert len(names) >= 2
    assert not [name for name in names if name not in render_configuration()]
