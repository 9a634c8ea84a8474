"""Where a model's files are: turns what the user named into a path on this machine.

A folder, a .gguf file, a Hub id, or nothing (the default model). Only the files that Octavo reads
are downloaded: no .bin, no other framework's weights, no second copy in a subfolder.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from octavo.config import EngineConfig, Environment
from octavo.errors import ConfigError
from octavo.models.default_model import DEFAULT_MODEL, get_default_model

Download = Callable[..., str]
"""A stand-in for ``huggingface_hub.snapshot_download``."""

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_MAX_NAME_LENGTH = 250  # characters of a Hub id, and of any name in a message
_HUB_ID = re.compile(r"(?P<repository>[\w.-]+(/[\w.-]+)?)(:(?P<variant>[\w.-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on this machine and how its weights are to be read."""

    name: str
    """As the user wrote it; if nothing was written, the default model's or its stand-in's."""
    path: Path
    """A folder with config.json, or a .gguf file."""
    load_format: Literal["safetensors", "gguf", "dummy"]
    seed: int
    """Of dummy weights."""
    cache_dir: Path | None = None
    """Where what is made of the weights may be kept for later starts."""

    @property
    def is_gguf(self) -> bool:
        """Whether config, tokenizer and weights are one GGUF file."""
        return self.path.suffix == ".gguf"


def resolve_source(
    config: EngineConfig, environment: Environment, *, download: Download | None = None
) -> ModelSource:
    """Find the model that ``config`` names, downloading it if need be.

    Raises:
        ConfigError: there is no such model, it may not be had, or ``load_format`` contradicts it.
    """
    if config.model is None:
        path = get_default_model(environment)
        name = DEFAULT_MODEL.name if path.name == DEFAULT_MODEL.file_name else path.name
    else:
        weights = () if config.load_format == "dummy" else _WEIGHT_FILES
        files = (*_CONFIG_FILES, *_TOKENIZER_FILES, *weights)
        hub = _Hub(download, token=config.hf_token, revision=config.revision)
        name, path = config.model, _find(config.model, files, hub)
    path = _find_gguf(path)
    stored_as: Literal["safetensors", "gguf"] = "gguf" if path.is_file() else "safetensors"
    if config.load_format not in ("auto", "dummy", stored_as):
        raise ConfigError(
            f"load_format is {config.load_format}, but {name} is stored as {stored_as}; use auto"
        )
    load_format = "dummy" if config.load_format == "dummy" else stored_as
    return ModelSource(
        name=name,
        path=path,
        load_format=load_format,
        seed=config.seed,
        cache_dir=environment.cache_dir,
    )


def resolve_tokenizer(
    config: EngineConfig, source: ModelSource, *, download: Download | None = None
) -> Path:
    """Return the folder or .gguf file that holds the tokenizer.

    Raises:
        ConfigError: there is no such tokenizer or it may not be had.
    """
    if config.tokenizer is None:
        return source.path
    hub = _Hub(download, token=config.hf_token, revision=config.tokenizer_revision)
    # Some tokenizers are told apart by the model type in config.json.
    return _find_gguf(_find(config.tokenizer, _CONFIG_FILES + _TOKENIZER_FILES, hub))


@dataclass(frozen=True, slots=True)
class _Hub:
    """The Hub client with the access and the revision of one download."""

    download: Download | None
    token: str | None
    revision: str | None

    def fetch(self, repository: str, files: Sequence[str]) -> Path:
        """Download the files that match and return their folder."""
        hub = import_module("octavo.models.hub")  # not for those whose model is here
        folder: Path = hub.fetch(
            repository,
            files=files,
            token=self.token,
            revision=self.revision,
            download=self.download,
        )
        return folder


def _find(name: str, files: Sequence[str], hub: _Hub) -> Path:
    if not name:
        raise ConfigError("a model's name is empty: leave it out, or name a folder or a Hub id")
    path = Path(name).expanduser()
    if _exists(path):
        return path
    hub_id = _HUB_ID.fullmatch(name) if len(name) <= _MAX_NAME_LENGTH else None
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or hub_id is None:
        raise ConfigError(f"there is no file or folder {name[:_MAX_NAME_LENGTH]}")
    if (variant := hub_id["variant"]) is None:
        return hub.fetch(hub_id["repository"], files)
    folder = hub.fetch(hub_id["repository"], [f"*{variant}.gguf", f"*{variant.lower()}.gguf"])
    return _only_gguf(
        [*folder.glob(f"*{variant}.gguf"), *folder.glob(f"*{variant.lower()}.gguf")], name
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for any file
        return False


def _find_gguf(path: Path) -> Path:
    """Return ``path`` itself, or the GGUF file of a folder that holds nothing else to load."""
    if path.is_dir() and not (path / "config.json").exists():
        return _only_gguf(list(path.glob("*.gguf")), str(path))
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a folder nor a .gguf file")
    return path


def _only_gguf(paths: Sequence[Path], place: str) -> Path:
    found = sorted(set(paths))
    if not found:
        raise ConfigError(f"{place} has neither a config.json nor a .gguf file")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{place} has several .gguf files; name one of {names}")
    return found[0]
