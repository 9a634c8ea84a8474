"""Starts a server: takes its address, starts the engine-core process, serves."""

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

from octavo.config import EngineConfig, Environment
from octavo.engine.door import QueueCaps
from octavo.engine.limits import ServingLimits
from octavo.entrypoints.logs import configure_logging
from octavo.entrypoints.openai.listener import bind
from octavo.entrypoints.processes import start_core_process
from octavo.entrypoints.server_settings import ServerSettings
from octavo.models.source import resolve_source


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Serve until SIGTERM, Ctrl-C or the engine's death; return the exit status: 0, 0 or 1.

    Raises:
        ConfigError: the settings do not fit this machine or the model.
    """
    configure_logging()
    signal.signal(signal.SIGTERM, _exit_while_loading)
    listener = bind(settings.host, settings.port)  # a taken port should not wait for the model
    client = start_core_process(config, resolve_source(config, Environment.read()))
    try:
        # Imported while the other process imports what it needs: each takes seconds.
        server = import_module("octavo.entrypoints.openai.server")
        options = server.ServerOptions(
            served_names=settings.served_model_name,
            shutdown_timeout_s=settings.shutdown_timeout,
            limits=_choose_limits(settings),
            access_log=settings.access_log,
        )
        status: int = server.serve(config, client, listener, options=options)
        return status
    finally:
        client.shutdown()


def _choose_limits(settings: ServerSettings) -> ServingLimits:
    return ServingLimits(
        queue_caps=QueueCaps(settings.max_queued_requests, settings.max_queued_tokens),
        request_timeout_s=settings.request_timeout,
        stall_timeout_s=settings.stall_timeout,
    )


def _exit_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every ``finally``; later the event loop takes the signal."""
    sys.exit(0)
