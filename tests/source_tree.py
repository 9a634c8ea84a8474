"""Where the project's own files are, each parsed once, for the tests that read the code."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(
    path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
)
SOURCES = {
    path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for path in sorted(
        [
            *(ROOT / "src" / "octavo").glob("*.py"),
            *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")),
        ]
    )
}
"""Every file of the package -> its syntax tree."""


def relative(path: Path) -> Path:
    """Path as it is written from the repository's root."""
    return path.relative_to(ROOT)
