"""What a client hears whose request is cut off: the server ends and has waited long enough."""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.http.errors import error_response

logger = logging.getLogger(__name__)


class RefuseCancelled:
    """A layer around the application: whoever has no answer yet gets a refusal for one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on."""
        is_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:  # the HTTP server has no other reason to cancel
            logger.warning("a request was cut off: the server ends")
            if not is_started:
                text = "the server is shutting down"
                await error_response(503, text, reason_code="shutting_down")(scope, receive, send)
