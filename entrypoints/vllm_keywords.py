"""Constructor keywords of vLLM's ``LLM``: those that Octavo has, and those that it can only refuse.

A keyword of a feature that Octavo lacks is accepted at the value that switches the feature off, so
that a script which spells its defaults out runs unchanged; any other value is an error.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ConfigError

SETTINGS = tuple(field.name for field in fields(EngineConfig))

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "attention_config": (None,),
    "code_revision": (None,),
    "compilation_config": (None,),
    "convert": ("auto",),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (False, True),  # there is none to disable
    "disable_log_stats": (True,),
    "distributed_executor_backend": (None, "mp", "uni"),
    "download_dir": (None,),
    "enable_chunked_prefill": (None, True),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_return_routed_experts": (False,),
    "enable_sleep_mode": (False,),
    "hf_overrides": (None, {}),
    "kv_events_config": (None,),
    "kv_transfer_config": (None,),
    "limit_mm_per_prompt": (None, {}),
    "logits_processors": (None, []),
    "logprobs_mode": ("raw_logprobs",),
    "mm_processor_kwargs": (None, {}),
    "model_impl": ("auto",),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_params": (None,),
    "offload_prefetch_step": (1,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "prefix_caching_hash_algo": ("sha256",),
    "profiler_config": (None,),
    "quantization_config": (None,),
    "runner": ("auto", "generate"),
    "served_model_name": (None,),
    "speculative_config": (None,),
    "structured_outputs_config": (None,),
    "swap_space": (0,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False,),
}

VALUE_ALIASES: dict[str, dict[object, object]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "long_prefill_token_threshold": {0: None},
    "max_model_len": {-1: None, "auto": None},
}
"""vLLM's other words for values of settings that both have."""


def create_engine_config(keywords: Mapping[str, Any]) -> EngineConfig:
    """Build the settings from keywords.

    Raises:
        TypeError: a keyword is neither ours nor vLLM's; the message names the nearest one.
        ConfigError: a value is impossible, or asks for a feature that Octavo does not have.
    """
    settings = {}
    hints = get_type_hints(EngineConfig)
    for name, value in keywords.items():
        if name in SETTINGS:
            settings[name] = _convert(name, value, hints[name])
        elif name not in NEUTRAL_VALUES:
            raise TypeError(_describe_unknown(name))
        elif value not in NEUTRAL_VALUES[name]:
            raise ConfigError(
                f"{name} is {value!r}, which Octavo does not support: leave it out, or give"
                f" {NEUTRAL_VALUES[name][0]!r}"
            )
    return EngineConfig(**settings)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return a value of the setting's type; a path is as good as its text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) in (str, int):
        value = VALUE_ALIASES.get(name, {}).get(value, value)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        if get_origin(hint) is Literal:
            allowed = ", ".join(get_args(hint))
            raise ConfigError(f"{name} is {value!r}; it must be one of {allowed}") from error
        raise ConfigError(f"{name} is {value!r}: {error}") from error


def _describe_unknown(name: str) -> str:
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; docs/configuration.md lists them all"
    return f"LLM has no keyword {name!r}{hint}"
