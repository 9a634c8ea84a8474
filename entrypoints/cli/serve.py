"""``octavo serve``: an OpenAI-compatible server for one model."""

import signal
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from importlib import import_module
from types import FrameType
from typing import NoReturn

from octavo.config import EngineConfig, Environment
from octavo.engine.door import QueueCaps
from octavo.engine.limits import ServingLimits
from octavo.entrypoints.cli.options import add_engine_options, get_engine_settings
from octavo.entrypoints.logs import configure_logging
from octavo.entrypoints.openai.listener import bind
from octavo.entrypoints.processes import start_core_process
from octavo.models.source import resolve_source


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=SUPPRESS,
        help="folder, .gguf file or Hub id; without one, the default model",
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 is every network of this machine [%(default)s]",
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 takes a free one [%(default)s]"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names of the model in the API; the first stands in metrics [MODEL]",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on SIGTERM, how long open requests may go on before they are aborted [%(default)s]",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        help="answer 429 instead of letting more than N requests wait [no limit]",
    )
    group.add_argument(
        "--max-queued-tokens",
        type=int,
        metavar="N",
        help="answer 429 instead of letting more than N prompt tokens wait [no limit]",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="end requests that set no timeout of their own after this time [no limit]",
    )
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="not ready when no step of open requests has ended for this time [%(default)s]",
    )
    group.add_argument(
        "--access-log",
        action=BooleanOptionalAction,
        default=True,
        help="log a line for each HTTP request",
    )
    add_engine_options(parser)


def run(args: Namespace) -> int:
    """Serve until SIGTERM, Ctrl-C or the engine's death; 0, 0 or 1."""
    configure_logging()
    signal.signal(signal.SIGTERM, _exit_while_loading)
    config = EngineConfig(**get_engine_settings(args))
    limits = ServingLimits(
        queue_caps=QueueCaps(args.max_queued_requests, args.max_queued_tokens),
        request_timeout_s=args.request_timeout,
        stall_timeout_s=args.stall_timeout,
    )
    listener = bind(args.host, args.port)  # a taken port should not wait for the model
    client = start_core_process(config, resolve_source(config, Environment.read()))
    try:
        # Imported while the other process imports what it needs: each takes seconds.
        server = import_module("octavo.entrypoints.openai.server")
        options = server.ServerOptions(
            served_names=tuple(args.served_model_name),
            shutdown_timeout_s=args.shutdown_timeout,
            limits=limits,
            access_log=args.access_log,
        )
        status: int = server.serve(config, client, listener, options=options)
        return status
    finally:
        client.shutdown()


def _exit_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every ``finally``; later the event loop takes the signal."""
    sys.exit(0)
