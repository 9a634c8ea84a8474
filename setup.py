"""Build script.

The code lives in the top-level folders. ``src/octavo`` holds the package's ``__init__`` and one
relative link per folder, so that ``engine/`` is imported as ``octavo.engine`` and nothing generic
reaches site-packages.
"""

from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = Path(__file__).parent / "src" / "octavo"
broken = [
    entry.name
    for entry in PACKAGE.iterdir()
    if entry.is_file() and entry.suffix not in (".py", ".typed")
]
if broken:
    raise SystemExit(
        f"src/octavo/{broken[0]} is not a link: use git clone or the .tar.gz archive, not a .zip"
    )

setup(package_dir={"": "src"}, packages=find_packages("src"), package_data={"octavo": ["py.typed"]})
