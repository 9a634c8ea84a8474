"""Makes engine cores: the only place that picks an executor, and where open settings are resolved.

``processes`` starts the process in which a server does this; it loads no tokenizer.
"""

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from octavo.config import DEVICE_DEFAULTS, EngineConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.journal import Journal
from octavo.errors import ConfigError
from octavo.executor.compile_ahead import StartCompiler
from octavo.executor.in_process import create_executor
from octavo.executor.step import ExecutorInfo
from octavo.models.source import ModelSource
from octavo.shown_settings import SettingValue, show_settings

logger = logging.getLogger(__name__)

SERVING_TOKEN_BUDGET = 8_192
"""A server's step is kept shorter than an offline one: a decoding client waits for all of it."""


def resolve_config(config: EngineConfig, *, is_serving: bool = False) -> EngineConfig:
    """Return the settings with everything decided that depends on the device."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = DEVICE_DEFAULTS[device]
    token_budget = defaults["max_num_batched_tokens"]
    if is_serving:
        token_budget = min(token_budget, SERVING_TOKEN_BUDGET)
    is_async = config.async_scheduling
    return replace(
        config,
        device=device,
        max_num_seqs=config.max_num_seqs or defaults["max_num_seqs"],
        max_num_batched_tokens=config.max_num_batched_tokens or token_budget,
        async_scheduling=device == "cuda" if is_async is None else is_async,
    )


def start_compiler(config: EngineConfig) -> AbstractContextManager[StartCompiler | None]:
    """Fork the process that compiles a GPU's kernels; a CPU needs none.

    Whoever starts threads of its own starts them afterwards: what a thread has locked while the
    process forks stays locked in the fork for ever.
    """
    return StartCompiler() if config.device == "cuda" else nullcontext()


def create_core(
    config: EngineConfig,
    source: ModelSource,
    compiler: StartCompiler | None = None,
    *,
    is_serving: bool = False,
) -> EngineCore:
    """Load the model and return the core that plans for it; the settings are resolved.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
    """
    with ExitStack() as opened:
        # A file that cannot be written should not wait for the model.
        sink = None if config.journal is None else opened.enter_context(_open(config.journal))
        executor = create_executor(config, source, compiler)
        scheduler_config = create_scheduler_config(config, executor.info, is_serving=is_serving)
        opened.pop_all()
    return EngineCore(
        executor,
        scheduler_config,
        lag=1 if config.async_scheduling else 0,
        journal=None if sink is None else Journal(scheduler_config, sink=sink),
        settings=_show_resolved(config, executor.info, scheduler_config),
    )


def create_scheduler_config(
    config: EngineConfig, info: ExecutorInfo, *, is_serving: bool = False
) -> SchedulerConfig:
    """Combine resolved settings with what the executor measured.

    Offline all requests are there at once, so the policy may rank all of them.
    """
    assert config.max_num_batched_tokens is not None, "the settings are not resolved"
    # Each running request takes at least one token of a step.
    max_num_seqs = min(info.num_rows, config.max_num_batched_tokens)
    if max_num_seqs < info.num_rows:
        logger.warning(
            "max_num_seqs is %d instead of %d: a step has max_num_batched_tokens=%d",
            max_num_seqs,
            info.num_rows,
            config.max_num_batched_tokens,
        )
    scheduler_config = SchedulerConfig(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        conservativeness=config.schedule_conservativeness,
        min_deferral_tokens=config.min_deferral_tokens,
    )
    return scheduler_config if is_serving else replace(scheduler_config, ranking_window=None)


def _show_resolved(
    config: EngineConfig, info: ExecutorInfo, scheduler_config: SchedulerConfig
) -> dict[str, SettingValue]:
    """Return the settings as they may be shown, with what was decided since they were given."""
    return {
        **show_settings(config),
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
        "block_size": info.block_size,
        "quantization": info.quantization,
        "max_model_len": info.max_model_len,
        "max_num_seqs": scheduler_config.max_num_seqs,
    }


def _open(journal: str) -> BinaryIO:
    try:
        return Path(journal).open("wb")
    except OSError as error:
        raise ConfigError(f"journal is {journal}, which cannot be written: {error}") from error
