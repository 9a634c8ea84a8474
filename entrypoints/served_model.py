"""What the front end knows of a model: its files, its tokenizer, its template and its defaults.

No weights and no device: a server's API process has this, its engine-core process has the rest.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig, Environment
from octavo.engine.chat import ChatTemplate
from octavo.engine.messages import CoreInfo
from octavo.engine.request_factory import RequestDefaults
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.template_sandbox import read_chat_template
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequestError
from octavo.models.config import GenerationConfig
from octavo.models.config_files import load_config, load_generation_config
from octavo.models.gguf_header import read_gguf_header
from octavo.models.source import ModelSource, resolve_tokenizer
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

PARAMETER_OF_FIELD = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json -> the sampling parameter whose default it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its callers see it."""

    source: ModelSource
    tokenizer: Tokenizer | None
    """None takes and gives token ids alone."""
    chat_template: ChatTemplate | None
    """Renders chats, or says that the model has no template; None without a tokenizer."""
    sampling_defaults: Mapping[str, Any]
    """Fields of SamplingParams that differ from their own defaults unless a request sets them."""
    request_defaults: RequestDefaults

    def default_sampling_params(self) -> SamplingParams:
        """Return new parameters with the model's defaults."""
        return SamplingParams(**self.sampling_defaults)

    def create_tracker(self, info: CoreInfo) -> RequestTracker:
        """Return a tracker of requests to this model on the engine that ``info`` describes."""
        return RequestTracker(self.tokenizer, info, self.request_defaults)


def load_served_model(
    config: EngineConfig, source: ModelSource, environment: Environment
) -> ServedModel:
    """Load everything of a model but its weights.

    Raises:
        ConfigError: the model, its tokenizer, its template or its defaults cannot be used.
    """
    eos_ids = dict.fromkeys(load_config(source).eos_token_ids)
    tokenizer = None
    chat_template = None
    if not config.skip_tokenizer_init:
        tokenizer = _load_tokenizer(resolve_tokenizer(config, source), environment)
        chat_template = ChatTemplate(tokenizer, read_chat_template(config.chat_template))
        if tokenizer.eos_id is not None:
            eos_ids[tokenizer.eos_id] = None
    return ServedModel(
        source=source,
        tokenizer=tokenizer,
        chat_template=chat_template,
        sampling_defaults=_choose_sampling_defaults(config, source),
        request_defaults=RequestDefaults(
            eos_ids=tuple(eos_ids),
            seed=config.seed,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
    )


def _load_tokenizer(path: Path, environment: Environment) -> Tokenizer:
    loader = import_module("octavo.engine.tokenizer_loader")  # transformers: seconds
    try:
        tokenizer: Tokenizer = loader.load_tokenizer(path, environment.cache_dir)
        return tokenizer
    except ConfigError:
        if path.is_file():
            # That the file is cut says more. With torch, which this process else does without.
            import_module("octavo.models.gguf").GGUFCheckpoint(read_gguf_header(path))
        raise


def _choose_sampling_defaults(config: EngineConfig, source: ModelSource) -> dict[str, Any]:
    match config.generation_config:
        case "octavo" | "vllm":
            generation = GenerationConfig()
        case "auto":
            generation = load_generation_config(source)
        case other:
            raise ConfigError(f"generation_config is {other!r}; it must be auto, octavo or vllm")
    own = {name: getattr(generation, name) for name in PARAMETER_OF_FIELD}
    override = config.override_generation_config or {}
    for name in override:
        if name not in PARAMETER_OF_FIELD:
            known = ", ".join(PARAMETER_OF_FIELD)
            raise ConfigError(f"override_generation_config has {name!r}; it may have {known}")
    return _check_defaults({**own, **override}, source.name)


def _check_defaults(values: Mapping[str, Any], model_name: str) -> dict[str, Any]:
    """Return sampling parameters for the fields of a generation_config.json that are set."""
    defaults = {
        PARAMETER_OF_FIELD[name]: value for name, value in values.items() if value is not None
    }
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(
            f"generation_config.json of {model_name}, or override_generation_config, cannot be"
            f" used: {error}; start with generation_config=octavo"
        ) from error
    if defaults:
        # A warning: outputs are not those of the neutral values that a reader of the API expects.
        logger.warning(
            "sampling defaults are not neutral, by the model's generation_config.json or by"
            " override_generation_config: %s; a request's own values win, and"
            " generation_config=octavo ignores the file",
            ", ".join(f"{name}={value}" for name, value in defaults.items()),
        )
    return defaults
