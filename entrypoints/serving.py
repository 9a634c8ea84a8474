"""Starts a server: takes its address, starts the engine-core process, serves."""

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

from octavo.config import EngineConfig, Environment
from octavo.engine.template_sandbox import read_chat_template
from octavo.entrypoints.credentials import read_credentials
from octavo.entrypoints.file_limit import raise_file_limit
from octavo.entrypoints.http.listener import open_listener
from octavo.entrypoints.logs import configure_http_logging, configure_logging
from octavo.entrypoints.processes import start_core_process
from octavo.entrypoints.server_settings import ServerSettings
from octavo.models.source import resolve_source


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Serve until SIGTERM, Ctrl-C or the engine's death; return the exit status: 0, 0 or 1.

    Raises:
        ConfigError: the settings do not fit this machine or the model.
    """
    configure_logging(settings.log_level)
    configure_http_logging(settings.uvicorn_log_level, settings.disable_access_log_for_endpoints)
    signal.signal(signal.SIGTERM, _exit_while_loading)
    raise_file_limit()
    environment = Environment.read()
    # What can be wrong with these and the address should not wait for the model.
    read_chat_template(config.chat_template)
    credentials = read_credentials(settings, environment)
    with open_listener(settings) as listener:
        source = resolve_source(config, environment)
        client = start_core_process(config, source, log_level=settings.log_level)
        try:
            # Imported while the other process imports what it needs: each takes seconds.
            server = import_module("octavo.entrypoints.openai.server")
            status: int = server.serve(
                config, source, client, listener, settings=settings, credentials=credentials
            )
            return status
        finally:
            client.shutdown()


def _exit_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every ``finally``; later the event loop takes the signal."""
    sys.exit(0)
