"""Which web pages may use a server (CORS)."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.server_settings import ServerSettings

EXPOSED_HEADERS = ("retry-after", "x-octavo-ignored-fields", "x-request-id")
"""What scripts of such pages may read besides the body."""


class AnswerWebPages:
    """A layer around everything else, so that a preflight needs no key and a refusal is readable.

    Requests that come from no page pass at once.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=[origin.lower() for origin in settings.allowed_origins],
            allow_methods=[method.upper() for method in settings.allowed_methods],
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight; hand on everything else."""
        is_from_page = any(name == b"origin" for name, _ in scope["headers"])
        await (self._cors if is_from_page else self._app)(scope, receive, send)
