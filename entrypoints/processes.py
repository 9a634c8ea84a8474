"""Starts the engine-core process of a server, and loads nothing that only that process needs."""

import gc
from dataclasses import dataclass
from importlib import import_module

from octavo.config import EngineConfig
from octavo.engine.core_process import Core
from octavo.engine.ipc_client import IpcClient
from octavo.entrypoints.logs import configure_logging
from octavo.models.source import ModelSource


def start_core_process(
    config: EngineConfig, source: ModelSource, *, log_level: str = "info"
) -> IpcClient:
    """Start a process that loads the model and serves its core; returns before it is ready."""
    return IpcClient(ServedCore(config, source, log_level))


@dataclass(frozen=True, slots=True)
class ServedCore:
    """Travels to the engine-core process and creates the core there."""

    config: EngineConfig
    source: ModelSource
    log_level: str

    def __call__(self) -> Core:
        """Load the engine, then the model.

        Raises:
            ConfigError: a setting does not fit the model or this machine.
        """
        configure_logging(self.log_level)
        launch = import_module("octavo.entrypoints.launch")  # torch and kernels: seconds
        config = launch.resolve_config(self.config, is_serving=True)
        with launch.start_compiler(config) as compiler:
            core: Core = launch.create_core(config, self.source, compiler, is_serving=True)
        freeze_garbage()
        return core


def freeze_garbage() -> None:
    """Let the collector pass over all that a process has loaded, hundreds of thousands of objects.

    Otherwise it stops every request for tenths of a second now and then, and finds nothing.
    """
    gc.collect()
    gc.freeze()
