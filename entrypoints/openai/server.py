"""Runs the application: its socket, its signals, and the ways in which it ends."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
import uvloop

from octavo.config import EngineConfig, Environment
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.door import QueueCaps
from octavo.engine.ipc_client import IpcClient
from octavo.engine.limits import ServingLimits
from octavo.engine.load_log import LoadLog
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request_lines import log_requests
from octavo.entrypoints.credentials import Credentials
from octavo.entrypoints.file_limit import choose_max_connections
from octavo.entrypoints.http.connection import ConnectionLimits, GuardedConnection
from octavo.entrypoints.http.layers import add_layers
from octavo.entrypoints.http.listener import (
    SEND_TIMEOUT_S,
    describe_address,
    is_public,
    release_at_end,
)
from octavo.entrypoints.openai.app import create_app
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.processes import freeze_garbage
from octavo.entrypoints.served_model import load_served_model
from octavo.entrypoints.server_settings import ServerSettings
from octavo.models.source import ModelSource

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 60.0
"""How long a client may take to send a request."""
EXIT_DELAY_S = 1.0
"""After the engine's death: open streams get their error, and a health check sees 503."""
GRACE_S = 5
"""How long a client may take to read the end of its stream when the server ends."""


def serve(
    config: EngineConfig,
    source: ModelSource,
    client: IpcClient,
    listener: socket.socket,
    *,
    settings: ServerSettings,
    credentials: Credentials,
) -> int:
    """Load the front end's half of the model, wait for the core, serve; return the exit status.

    Raises:
        ConfigError: the model cannot be served.
    """
    model = load_served_model(config, source, Environment.read())
    client.wait_until_ready()
    names = tuple(dict.fromkeys(settings.served_model_name)) or (model.source.name,)
    metrics = EngineMetrics(names[0], client.info)
    tracker = model.create_tracker(client.info)
    if settings.enable_log_requests:
        log_requests(tracker)
    engine = AsyncEngine(client, tracker, metrics, limits=choose_limits(settings))
    service = Service(
        engine=engine,
        model=model,
        model_names=names,
        has_admin_endpoints=settings.enable_admin_endpoints,
        settings=settings,
    )

    freeze_garbage()

    async def run() -> int:
        server = Server(service, settings, credentials, kill=client.kill)
        server.install_signal_handlers()
        if model.chat_template is not None:
            await service.templates.warm_up()
        return await server.run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def choose_limits(settings: ServerSettings) -> ServingLimits:
    """Return what the settings say about queues and times."""
    return ServingLimits(
        queue_caps=QueueCaps(settings.max_queued_requests, settings.max_queued_tokens),
        request_timeout_s=settings.request_timeout,
        stall_timeout_s=settings.stall_timeout,
    )


class Server:
    """Serves one engine until it is stopped or the engine dies.

    ``stop`` ends it: open requests have ``shutdown_timeout`` to finish, then they are aborted.
    A second ``stop`` calls ``kill``, which ends the core, and waits for nothing.
    """

    def __init__(
        self,
        service: Service,
        settings: ServerSettings,
        credentials: Credentials,
        *,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._engine = service.engine
        self._shutdown_timeout_s = settings.shutdown_timeout
        self._kill = kill
        self._status = 0
        self._drain: asyncio.Task[None] | None = None
        self._credentials = credentials
        self._load_log = None if settings.disable_log_stats else LoadLog(self._engine.metrics)
        self._address: str
        self._http = HttpServer(self._announce, _configure_http(service, settings, credentials))

    async def run(self, listener: socket.socket) -> int:
        """Serve on a bound socket; return the exit status of the process."""
        is_encrypted = self._credentials.tls is not None
        self._address = describe_address(listener, is_encrypted=is_encrypted)
        if self._credentials.api_keys is None and is_public(listener):
            logger.warning("there are no API keys: whoever reaches this machine may use the server")
        self._engine.start()
        tasks = [asyncio.create_task(self._end_with_engine())]
        if self._load_log is not None:
            tasks.append(asyncio.create_task(self._load_log.run()))
        try:
            await self._http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await self._service.templates.shutdown()
            await self._engine.shutdown()
        return self._status

    @property
    def is_stopping(self) -> bool:
        """True once the server has been told to end."""
        return self._drain is not None

    def install_signal_handlers(self) -> None:
        """Let SIGTERM and Ctrl-C stop the server; only on the main thread's event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """End; called again, end at once."""
        if self.is_stopping:
            logger.warning("ending at once")
            self._status = 1
            self._http.force_exit = True
            self._kill()
            return
        logger.info("ending: %d requests are open", self._engine.num_open_requests)
        self._service.is_draining = True
        self._http.close_port()
        self._drain = asyncio.create_task(self._drain_requests())

    def _announce(self) -> None:
        names = ", ".join(self._service.model_names)
        logger.info("serving %s at %s", names, self._address)

    async def _drain_requests(self) -> None:
        self._http.should_exit = True  # it waits for the open connections
        self._engine.control.end_pause()  # the open requests may use the time that they have left
        try:
            async with asyncio.timeout(self._shutdown_timeout_s):
                await self._engine.wait_until_idle()
        except TimeoutError:
            self._engine.abort_all()

    async def _end_with_engine(self) -> None:
        reason = await self._engine.wait_until_dead()
        if not self._http.force_exit:  # else it was killed on purpose
            logger.critical("the engine died: %s", reason)
        self._status = 1
        await asyncio.sleep(EXIT_DELAY_S)
        self._service.is_draining = True
        self._http.should_exit = True


def _configure_http(
    service: Service, settings: ServerSettings, credentials: Credentials
) -> uvicorn.Config:
    app = create_app(service, has_documents=not settings.disable_fastapi_docs)
    config = uvicorn.Config(
        add_layers(app, settings, credentials.api_keys, service.engine.metrics.registry),
        log_config=None,
        access_log=settings.access_log,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout) + GRACE_S,
        http=_choose_connection(settings),
        ws="none",
    )
    config.load()
    config.ssl = credentials.tls  # uvicorn would read the files only when the model is loaded
    return config


def _choose_connection(settings: ServerSettings) -> type[asyncio.Protocol]:
    limits = ConnectionLimits(
        max_connections=choose_max_connections(settings.max_connections),
        max_header_bytes=settings.max_header_bytes,
        max_header_count=settings.max_header_count,
        receive_timeout_s=RECEIVE_TIMEOUT_S,
        send_timeout_s=SEND_TIMEOUT_S,
    )
    # uvicorn calls it like a class.
    return cast(type[asyncio.Protocol], partial(GuardedConnection, limits=limits))


class HttpServer(uvicorn.Server):
    """A uvicorn server that says when it listens and leaves the process's signals alone."""

    def __init__(self, announce: Callable[[], None], config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []  # uvicorn has none before it listens
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        for listener in sockets or ():
            release_at_end(listener)
        await super().startup(sockets)
        self._announce()

    def close_port(self) -> None:
        """Take no new connections. ``should_exit`` does that too, but is looked at now and then."""
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: ``Server`` decides what a signal means."""
        yield
