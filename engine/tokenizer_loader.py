"""API process: a tokenizer read from a model's folder or .gguf file."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)


def load_tokenizer(path: Path, cache_dir: Path) -> Tokenizer:
    """Load the tokenizer of a folder or a .gguf file; one made from GGUF is kept in the cache.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be read.
    """
    try:
        hf_tokenizer = _load_gguf(path, cache_dir) if path.is_file() else _load_folder(path)
    except ImportError as error:
        raise ConfigError(f"the tokenizer of {path} needs a package: {error}") from error
    except Exception as error:  # transformers and tokenizers raise plain ones for bad files
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"cannot load a tokenizer from {path}: {reason}; name one with tokenizer, or set"
            " skip_tokenizer_init"
        ) from error
    return Tokenizer(hf_tokenizer)


def _load_folder(folder: Path) -> PreTrainedTokenizerBase:
    # Looked up only here: transformers imports torch with it, which takes a second or two.
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True
    )
    return tokenizer


def _load_gguf(path: Path, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Convert once: reading the vocabulary out of GGUF takes seconds, the saved form a fraction."""
    folder = cache_dir / "tokenizers" / _fingerprint(path)
    if os.path.exists(folder):  # a path's own method fails where folders cannot be entered
        try:
            return _load_converted(folder)
        except Exception as error:  # plain ones for bad files
            logger.warning("%s is damaged and will be made anew: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
            tokenizer.save_pretrained(name)
            os.replace(name, folder)  # whole or not at all, whoever else does the same
    except Exception as error:  # tokenizers raises plain ones, of a full disk too
        if not os.path.exists(folder):  # another process may have been faster
            logger.info("the tokenizer of %s is not cached: %s", path, error)
    return tokenizer


def _load_converted(folder: Path) -> PreTrainedTokenizerBase:
    """Load what was saved, without AutoTokenizer if it is of the class that all files describe."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if settings["tokenizer_class"] != PreTrainedTokenizerFast.__name__:
        return _load_folder(folder)
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True
    )
    return tokenizer


def _fingerprint(path: Path) -> str:
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{transformers.__version__}"
    return hashlib.sha256(key.encode()).hexdigest()[:32]
