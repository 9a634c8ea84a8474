"""What lies around the application."""

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from octavo.entrypoints.api_keys import ApiKeys
from octavo.entrypoints.http.authentication import RequireApiKey
from octavo.entrypoints.http.cross_origin import AnswerWebPages
from octavo.entrypoints.http.endings import RefuseCancelled
from octavo.entrypoints.http.request_ids import SendRequestIds
from octavo.entrypoints.http.request_metrics import CountRequests
from octavo.entrypoints.http.root_path import ShowUnderPath
from octavo.entrypoints.server_settings import ServerSettings


def add_layers(
    api: FastAPI,
    settings: ServerSettings,
    api_keys: ApiKeys | None,
    registry: CollectorRegistry,
) -> ASGIApp:
    """Return the application within its layers, the last one outermost."""
    app: ASGIApp = RefuseCancelled(api)
    if api_keys is not None:
        app = RequireApiKey(app, api_keys, root_path=settings.root_path)
    if settings.enable_request_id_headers:
        app = SendRequestIds(app)
    app = CountRequests(app, api.routes, registry)
    if settings.root_path:
        app = ShowUnderPath(app, settings.root_path)
    if settings.allowed_origins:
        app = AnswerWebPages(app, settings)
    return app
