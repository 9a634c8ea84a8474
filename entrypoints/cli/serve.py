"""``octavo serve``: an OpenAI-compatible server for one model."""

import asyncio
import logging
import signal
import socket
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from types import FrameType
from typing import NoReturn

import uvloop

from octavo.config import EngineConfig, Environment
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.ipc_client import IpcClient
from octavo.engine.metrics import EngineMetrics
from octavo.entrypoints.cli.options import add_engine_options, get_engine_settings
from octavo.entrypoints.launch import start_core_process
from octavo.entrypoints.logs import configure_logging
from octavo.entrypoints.openai.server import Server, bind
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.served_model import ServedModel, load_served_model

logger = logging.getLogger(__name__)


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
    listener = bind(args.host, args.port)  # a taken port should not wait for the model
    model = load_served_model(config, Environment.read())
    client = start_core_process(config, model.source)
    try:
        client.wait_until_ready()
        service = _create_service(model, client, args.served_model_name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(service, client, listener, args))
    finally:
        client.shutdown()


async def _serve(
    service: Service, client: IpcClient, listener: socket.socket, args: Namespace
) -> int:
    server = Server(
        service,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.access_log,
        kill=client.kill,
    )
    server.install_signal_handlers()
    return await server.run(listener)


def _create_service(
    model: ServedModel, client: IpcClient, served_names: list[str] | None
) -> Service:
    names = tuple(served_names or [model.source.name])
    engine = AsyncEngine(
        client, model.create_tracker(client.info), EngineMetrics(names[0], client.info)
    )
    return Service(engine=engine, model=model, model_names=names)


def _exit_while_loading(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every ``finally``; later the event loop takes the signal."""
    sys.exit(0)
