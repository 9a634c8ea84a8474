"""A real server in a thread: HTTP as clients see it, over a core that echoes or a whole engine."""

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn.server
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import EngineConfig, Environment
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.chat import ChatTemplate
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request_factory import RequestDefaults
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.credentials import read_credentials
from octavo.entrypoints.http.listener import bind
from octavo.entrypoints.launch import create_core, resolve_config
from octavo.entrypoints.openai.server import Server, choose_limits
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.openai.template_pool import TemplatePool
from octavo.entrypoints.served_model import ServedModel, load_served_model
from octavo.entrypoints.server_settings import ServerSettings
from octavo.models.source import ModelSource, resolve_source
from octavo.sampling_params import SamplingParams
from tests.checkpoints import build_tokenizer
from tests.echo_core import EchoCore, ThreadClient
from tests.streams import add

TIMEOUT_S = 20
NO_ENVIRONMENT = Environment(default_model=None, cache_dir=Path())


class HurriedAsyncio:
    """What uvicorn's loop runs on: it looks more often whether it should end."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay_s):
        await asyncio.sleep(delay_s / 20)


uvicorn.server.asyncio = HurriedAsyncio()


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    data: bytes = field(repr=False)

    @property
    def json(self):
        return json.loads(self.data, parse_constant=_refuse_constant)

    @property
    def events(self):
        """The events of a stream, without the end mark that must be the last one."""
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in self.data.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [
            json.loads(line.removeprefix("data: "), parse_constant=_refuse_constant)
            for line in lines[:-1]
        ]


@dataclass
class Peer:
    """A server on this machine, by its port."""

    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def request(self, method, path, data=None, headers=None):
        connection = self.connect()
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        return self.request("POST", path, data, headers)

    def start_posts(self, path, *bodies):
        """Send requests from threads; return a function that waits for their replies."""
        replies = [None] * len(bodies)

        def post(index):
            replies[index] = self.post(path, bodies[index])

        threads = [threading.Thread(target=post, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()

        def collect():
            for thread in threads:
                thread.join(TIMEOUT_S)
            return replies

        return collect

    def metric(self, name):
        """Read the sum of a metric's samples, over all labels."""
        lines = self.get("/metrics").data.decode().splitlines()
        ours = "\n".join(line for line in lines if line.startswith(name))
        families = text_string_to_metric_families(ours)
        samples = [s.value for family in families for s in family.samples if s.name == name]
        assert samples, name
        return sum(samples)

    def wait_until(self, condition):
        """Poll until something is true; meanwhile the server is asked how it is."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it did not become true"
            self.get("/health")

    def wait_for_metric(self, name, value):
        """Poll until a metric has a value; nothing else is sent meanwhile."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"


@dataclass
class LiveServer(Peer):
    """A server in a thread of this process."""

    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop
    core: EchoCore | None
    thread: threading.Thread | None = None
    status: int | None = None

    def stop(self):
        """Do what a signal does."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def call(self, coroutine):
        """Run a coroutine on the server's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)

    def kill_core(self):
        """Let the core die, and wait until the front end knows."""
        engine = self.service.engine
        self.call(add(engine, [5], SamplingParams(), request_id="crash"))
        self.call(engine.wait_until_dead())


def create_echo_model(*, chat_template=None, sampling_defaults=None):
    """Return the model that an EchoCore stands for."""
    tokenizer = Tokenizer(build_tokenizer())
    return ServedModel(
        source=ModelSource(name="somewhere/tiny", path=Path("tiny"), load_format="dummy", seed=0),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer, chat_template),
        sampling_defaults=sampling_defaults or {},
        request_defaults=RequestDefaults(eos_ids=(2,)),
    )


@contextmanager
def running_checkpoint(path, *, options=None, **settings):
    """Serve a checkpoint with the whole engine in this process."""
    config = EngineConfig(model=str(path), device="cpu", num_gpu_blocks_override=256, **settings)
    environment = Environment.read()
    model = load_served_model(config, resolve_source(config, environment), environment)
    config = resolve_config(config, is_serving=True)
    core = create_core(config, model.source, is_serving=True)
    with running_server(core, model=model, **(options or {})) as live:
        yield live


@contextmanager
def running_server(
    core=None,
    *,
    client=None,
    model=None,
    kill=lambda: None,
    has_admin=False,
    limits=None,
    templates=None,
    **settings,
):
    """Serve a core from a thread, with some of the server's settings, and stop in the end."""
    model = model or create_echo_model()
    if client is None:
        core = core or EchoCore()
        client = ThreadClient(core)
    metrics = EngineMetrics("tiny", client.info)
    settings = ServerSettings(**settings)
    credentials = read_credentials(settings, NO_ENVIRONMENT)
    tracker = model.create_tracker(client.info)
    engine = AsyncEngine(client, tracker, metrics, limits=limits or choose_limits(settings))
    names = ("tiny", "alias")
    service = Service(
        engine=engine,
        model=model,
        model_names=names,
        has_admin_endpoints=has_admin,
        settings=settings,
        templates=templates or TemplatePool(),
    )
    listener = bind("127.0.0.1", 0)
    listener.listen()
    server = Server(service, settings, credentials, kill=kill)
    loop = asyncio.new_event_loop()
    live = LiveServer(listener.getsockname()[1], service, server, loop, core)

    def serve():
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            live.status = runner.run(server.run(listener))

    live.thread = threading.Thread(target=serve)
    live.thread.start()
    try:
        yield live
    finally:
        if live.status is None and not server.is_stopping:
            live.stop()
        live.thread.join(TIMEOUT_S)
        assert not live.thread.is_alive(), "the server does not end"


def _refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")
