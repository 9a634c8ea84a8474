"""The links in src/octavo, the top-level folders and the tool settings agree."""

import os
import runpy
import shutil
import tomllib

import pytest
from setuptools import find_packages

from tests.source_tree import PACKAGES, ROOT, SOURCES

LINKS = ROOT / "src" / "octavo"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_every_package_has_its_relative_link():
    links = {path.name: str(path.readlink()) for path in LINKS.iterdir() if path.is_symlink()}
    assert links == {name: os.path.join("..", "..", name) for name in PACKAGES}


def test_every_folder_with_code_is_installed():
    folders = {path.resolve().parent for path in SOURCES}
    found = {(ROOT / "src" / name.replace(".", "/")).resolve() for name in find_packages("src")}
    assert folders == found


def test_a_link_that_became_a_file_is_refused(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "src" / "octavo").mkdir(parents=True)
    (tmp_path / "src" / "octavo" / "engine").write_text("../../engine")  # as in a .zip archive
    with pytest.raises(SystemExit, match="src/octavo/engine is not a link"):
        runpy.run_path(str(tmp_path / "setup.py"))


def test_the_tools_know_every_package():
    banned = set(SETTINGS["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    assert banned == {*PACKAGES, "src"}
    assert set(SETTINGS["coverage"]["run"]["source"]) == {*PACKAGES, "src/octavo"}
    assert set(SETTINGS["pyright"]["include"]) > set(PACKAGES)
