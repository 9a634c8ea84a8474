"""What lies around the application; nothing does that a server does not need."""

from starlette.types import ASGIApp

from octavo.entrypoints.api_keys import ApiKeys
from octavo.entrypoints.openai.authentication import RequireApiKey
from octavo.entrypoints.openai.cross_origin import AnswerWebPages
from octavo.entrypoints.openai.request_ids import SendRequestIds
from octavo.entrypoints.openai.root_path import ShowUnderPath
from octavo.entrypoints.server_settings import ServerSettings


def add_layers(app: ASGIApp, settings: ServerSettings, api_keys: ApiKeys | None) -> ASGIApp:
    """Return the application within its layers, the last one outermost."""
    if api_keys is not None:
        app = RequireApiKey(app, api_keys, root_path=settings.root_path)
    if settings.enable_request_id_headers:
        app = SendRequestIds(app)
    if settings.root_path:
        app = ShowUnderPath(app, settings.root_path)
    if settings.allowed_origins:
        app = AnswerWebPages(app, settings)
    return app
