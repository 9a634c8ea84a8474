"""Runs the application: its socket, its signals, and the ways in which it ends."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop

from octavo.config import EngineConfig, Environment
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.ipc_client import IpcClient
from octavo.engine.limits import NO_LIMITS, ServingLimits
from octavo.engine.metrics import EngineMetrics
from octavo.entrypoints.openai.app import create_app
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.processes import freeze_garbage
from octavo.entrypoints.served_model import load_served_model

logger = logging.getLogger(__name__)

EXIT_DELAY_S = 1.0
"""After the engine's death: open streams get their error, and a health check sees 503."""
GRACE_S = 5
"""How long a client may take to read the end of its stream when the server ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a user decides about a server besides its engine."""

    served_names: tuple[str, ...] = ()
    """Names of the model in the API; empty is the model's own."""
    shutdown_timeout_s: float = 0.0
    limits: ServingLimits = NO_LIMITS
    access_log: bool = False


def serve(
    config: EngineConfig, client: IpcClient, listener: socket.socket, *, options: ServerOptions
) -> int:
    """Load the front end's half of the model, wait for the core, serve; return the exit status.

    Raises:
        ConfigError: the model cannot be served.
    """
    model = load_served_model(config, Environment.read())
    client.wait_until_ready()
    names = options.served_names or (model.source.name,)
    metrics = EngineMetrics(names[0], client.info)
    tracker = model.create_tracker(client.info)
    engine = AsyncEngine(client, tracker, metrics, limits=options.limits)
    service = Service(engine=engine, model=model, model_names=names)

    freeze_garbage()

    async def run() -> int:
        server = Server(service, options, kill=client.kill)
        server.install_signal_handlers()
        return await server.run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


class Server:
    """Serves one engine until it is stopped or the engine dies.

    ``stop`` ends it: open requests have ``shutdown_timeout_s`` to finish, then they are aborted.
    A second ``stop`` calls ``kill``, which ends the core, and waits for nothing.
    """

    def __init__(
        self,
        service: Service,
        options: ServerOptions = ServerOptions(),
        *,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._engine = service.engine
        self._shutdown_timeout_s = options.shutdown_timeout_s
        self._kill = kill
        self._status = 0
        self._drain: asyncio.Task[None] | None = None
        self._address: tuple[str, int]
        self._http = HttpServer(
            self._announce,
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=options.access_log,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(options.shutdown_timeout_s) + GRACE_S,
            ),
        )

    async def run(self, listener: socket.socket) -> int:
        """Serve on a bound socket; return the exit status of the process."""
        self._address = listener.getsockname()[:2]
        self._engine.start()
        watch = asyncio.create_task(self._end_with_engine())
        try:
            await self._http.serve(sockets=[listener])
        finally:
            watch.cancel()
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
        self._drain = asyncio.create_task(self._drain_requests())

    def _announce(self) -> None:
        host, port = self._address
        names = ", ".join(self._service.model_names)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("serving %s at %s", names, url)

    async def _drain_requests(self) -> None:
        self._http.should_exit = True  # no new connections; waits for the open ones
        self._engine.end_pause()  # the open requests may use the time that they have left
        try:
            async with asyncio.timeout(self._shutdown_timeout_s):
                await self._engine.wait_until_idle()
        except TimeoutError:
            self._engine.abort_all()

    async def _end_with_engine(self) -> None:
        reason = await self._engine.wait_until_dead()
        logger.critical("the engine died: %s", reason)
        self._status = 1
        await asyncio.sleep(EXIT_DELAY_S)
        self._service.is_draining = True
        self._http.should_exit = True


class HttpServer(uvicorn.Server):
    """A uvicorn server that says when it listens and leaves the process's signals alone."""

    def __init__(self, announce: Callable[[], None], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: ``Server`` decides what a signal means."""
        yield
