"""Flags of ``vllm serve`` for what Octavo lacks, does always, or calls by another name.

As with ``LLM``'s keywords, a flag of a missing feature is taken at the value that switches the
feature off, so that a command which spells its defaults out runs unchanged; any other value is
refused by name. ``docs/configuration.md`` has the table.
"""

import json
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from argparse import BooleanOptionalAction as Switch
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from octavo.config import EngineConfig
from octavo.entrypoints.cli.sizes import read_size
from octavo.entrypoints.server_settings import ServerSettings
from octavo.entrypoints.vllm_keywords import NEUTRAL_VALUES

SERVER_VALUES: dict[str, tuple[object, ...]] = {
    "additional_config": (None, {}),
    "aggregate_engine_logging": (False,),
    "all2all_backend": (None,),
    "api_server_count": (1,),
    "calculate_kv_scales": (False,),
    "collect_detailed_traces": (None,),
    "config_format": ("auto",),
    "cudagraph_metrics": (False,),
    "data_parallel_address": (None,),
    "data_parallel_backend": ("mp",),
    "data_parallel_external_lb": (False,),
    "data_parallel_hybrid_lb": (False,),
    "data_parallel_rank": (None,),
    "data_parallel_rpc_port": (None,),
    "data_parallel_size_local": (None, 1),
    "data_parallel_start_rank": (None,),
    "decode_context_parallel_size": (1,),
    "disable_async_output_proc": (False, True),  # of an engine that is gone
    "disable_chunked_mm_input": (False, True),  # there are no images
    "disable_frontend_multiprocessing": (False,),
    "disable_hybrid_kv_cache_manager": (False, True),  # there is none
    "disable_log_requests": (True,),
    "ec_transfer_config": (None,),
    "enable_auto_tool_choice": (False,),
    "enable_dbo": (False,),
    "enable_elastic_ep": (False,),
    "enable_eplb": (False,),
    "enable_layerwise_nvtx_tracing": (False,),
    "enable_log_deltas": (False, True),  # part of enable_log_outputs
    "enable_log_outputs": (False,),
    "enable_logging_iteration_details": (False,),
    "enable_mfu_metrics": (False,),
    "enable_mm_embeds": (False,),
    "enable_offline_docs": (False,),
    "enable_per_request_metrics": (False,),
    "enable_prompt_tokens_details": (False, True),  # they are always there
    "enable_reasoning": (False,),
    "enable_server_load_tracking": (False, True),  # always on
    "enable_ssl_refresh": (False,),
    "enable_tokenizer_info_endpoint": (False,),
    "eplb_config": (None, {}),
    "exclude_tools_when_tool_choice_none": (False, True),  # there are no tools
    "expert_placement_strategy": ("linear",),
    "fingerprint_mode": (None, "none"),
    "fingerprint_value": (None,),
    "fully_sharded_loras": (False,),
    "guided_decoding_backend": ("auto",),
    "headless": (False,),
    "hf_config_path": (None,),
    "interleave_mm_strings": (False,),
    "io_processor_plugin": (None,),
    "kv_cache_dtype_skip_layers": (None, []),
    "kv_cache_metrics": (False,),
    "kv_offloading_backend": (None, "native"),  # part of kv_offloading_size
    "kv_offloading_size": (None,),
    "kv_sharing_fast_prefill": (False,),
    "log_config_file": (None,),
    "log_error_stack": (False,),
    "lora_modules": (None,),
    "mamba_block_size": (None,),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "max_cpu_loras": (None,),
    "max_cudagraph_capture_size": (None,),
    "max_log_len": (None,),
    "max_logprobs": (20,),
    "max_long_partial_prefills": (1,),
    "max_lora_rank": (16,),
    "max_loras": (1,),
    "max_num_partial_prefills": (1,),
    "max_num_scheduled_tokens": (None,),
    "max_parallel_loading_workers": (None,),
    "max_seq_len_to_capture": (8192,),
    "media_io_kwargs": (None, {}),
    "middleware": ([],),
    "mm_encoder_tp_mode": ("weights",),
    "mm_processor_cache_gb": (0, 4),  # there are no images
    "mm_processor_cache_type": ("lru",),
    "nnodes": (1,),
    "node_rank": (0,),
    "num_scheduler_steps": (1,),
    "optimization_level": (0,),
    "otlp_traces_endpoint": (None,),
    "performance_mode": (None, "balanced"),
    "prefill_context_parallel_size": (1,),
    "preemption_mode": (None, "recompute"),
    "reasoning_parser": (None, ""),
    "reasoning_parser_plugin": (None, ""),
    "renderer_num_workers": (1,),
    "rope_scaling": (None, {}),
    "rope_theta": (None,),
    "safetensors_load_strategy": ("lazy",),
    "scheduler_cls": (None,),
    "scheduler_reserve_full_isl": (True,),
    "show_hidden_metrics_for_version": (None,),
    "skip_mm_profiling": (False, True),  # there are no images
    "task": ("auto", "generate"),
    "tokens_only": (False,),
    "tool_call_parser": (None,),
    "tool_parser_plugin": (None, ""),
    "tool_server": (None,),
    "use_tqdm_on_load": (False, True),
    "use_v2_block_manager": (False, True),  # there is one
    "video_pruning_rate": (None, 0),
    "watermark": (0,),
    "worker_cls": ("auto",),
    "worker_extension_cls": (None, ""),
}
"""Flag of the server -> values at which nothing is missing; ``NEUTRAL_VALUES`` has the engine's."""

SHORT_FLAGS = {
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_rank": "-dpn",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
}


def list_missing() -> dict[str, tuple[object, ...]]:
    """Return every flag that can only be refused or change nothing, with the values it may have."""
    own = {field.name for settings in (EngineConfig, ServerSettings) for field in fields(settings)}
    values = {**NEUTRAL_VALUES, **SERVER_VALUES}
    return {name: values[name] for name in sorted(values) if name not in own}


def add_vllm_options(parser: ArgumentParser) -> None:
    """Add the flags that the help does not show."""
    parser.add_argument(
        "--disable-uvicorn-access-log",
        dest="access_log",
        action="store_false",
        default=SUPPRESS,
        help=SUPPRESS,
    )
    parser.add_argument(
        "--cudagraph-capture-sizes",
        dest="cuda_graph_sizes",
        type=read_size,
        nargs="+",
        default=SUPPRESS,
        help=SUPPRESS,
    )
    for name, values in list_missing().items():
        _add_missing(parser, name, values)


def _add_missing(parser: ArgumentParser, name: str, values: Collection[object]) -> None:
    flags = ["--" + name.replace("_", "-")]
    if name in SHORT_FLAGS:
        flags.append(SHORT_FLAGS[name])
    is_switch = any(isinstance(value, bool) for value in values)
    kind = MissingSwitch if is_switch else MissingFeature
    parser.add_argument(*flags, dest=name, action=kind, const=values, help=SUPPRESS)


class MissingFeature(Action):
    """Refuses every value but those of ``const``, which ask for nothing; sets nothing."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, const: Collection[object], help: str
    ) -> None:
        super().__init__(option_strings, dest, nargs="?", default=SUPPRESS, help=help)
        self._neutral = const

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Compare the value, or refuse."""
        if values is None or _read_value(values) not in self._neutral:
            parser.error(_describe_missing(str(option_string), self._neutral))


class MissingSwitch(Switch):
    """Refuses a position of the switch that is not one of ``const``; sets nothing."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, const: Collection[object], help: str
    ) -> None:
        super().__init__(option_strings, dest, default=SUPPRESS, help=help)
        self._neutral = const

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Compare the position, or refuse."""
        is_on = not str(option_string).startswith("--no-")
        if is_on not in self._neutral:
            parser.error(_describe_missing(str(option_string), ()))


def _read_value(text: str) -> object:
    """Return what a text means in JSON, or the text."""
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def _describe_missing(flag: str, neutral: Collection[object]) -> str:
    shown = [json.dumps(value).strip('"') for value in neutral if value is not None]
    hint = f"leave it out, or give {shown[0]}" if shown else "leave it out"
    return f"{flag} asks for something that Octavo does not have: {hint}"
