"""Numbers of the HTTP server and of its process, beside those of the engine."""

import time
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNKNOWN_PATH = "none"
"""Stands for every path that is no route, so that clients cannot make series."""
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class CountRequests:
    """A layer around the application; names and labels are those of FastAPI's instrumentator."""

    def __init__(
        self, app: ASGIApp, routes: Iterable[BaseRoute], registry: CollectorRegistry
    ) -> None:
        self._app = app
        self._paths: dict[object, str] = {
            route.endpoint: route.path for route in routes if isinstance(route, Route)
        }
        self._requests = Counter(
            "http_requests",
            "HTTP requests by method, class of status and route.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from the head of a request to the end of its response.",
            ("method", "handler"),
            buckets=BUCKETS,
            registry=registry,
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, and count it when it has ended."""
        start_s, status = time.monotonic(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = self._paths.get(scope.get("endpoint"), UNKNOWN_PATH)
            self._requests.labels(method, f"{status // 100}xx", route).inc()
            self._seconds.labels(method, route).observe(time.monotonic() - start_s)
