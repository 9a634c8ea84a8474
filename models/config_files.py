"""Reads a network's shape and sampling defaults: from JSON files or from a GGUF file. No torch."""

from octavo.models.config import (
    GenerationConfig,
    ModelConfig,
    parse_architecture,
    parse_generation_config,
    parse_model_config,
)
from octavo.models.fields import Fields
from octavo.models.gguf_config import parse_gguf_config, parse_gguf_generation_config
from octavo.models.gguf_header import read_gguf_header
from octavo.models.source import ModelSource


def load_config(source: ModelSource) -> ModelConfig:
    """Read what the network is, from config.json or a GGUF file's metadata.

    Raises:
        ConfigError: it is malformed, or asks for something unsupported.
    """
    if source.is_gguf:
        return parse_gguf_config(read_gguf_header(source.path))
    fields = Fields.read(source.path / "config.json")
    parse_architecture(fields)  # the first thing to say of an unknown network
    return parse_model_config(fields, load_generation_config(source))


def load_generation_config(source: ModelSource) -> GenerationConfig:
    """Read the model's sampling defaults; all None without a generation_config.json."""
    if source.is_gguf:
        return parse_gguf_generation_config(read_gguf_header(source.path))
    path = source.path / "generation_config.json"
    return parse_generation_config(Fields.read(path)) if path.exists() else GenerationConfig()
