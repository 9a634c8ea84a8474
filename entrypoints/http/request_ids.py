"""The id under which a request is known in responses, logs and metrics."""

from uuid import uuid4

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidRequestError

HEADER = "x-request-id"
MAX_ID_CHARACTERS = 256
SCOPE_KEY = "octavo.request_id"
"""Where the id stands in the ASGI scope once it has been chosen."""


def choose_request_id(request: Request, body_id: str | None) -> str:
    """Return the id in the client's header, else the one in its body, else a random one.

    Raises:
        InvalidRequestError: it could end a line of a log or of a header.
    """
    header_id = request.headers.get(HEADER)
    request_id = header_id or body_id
    if request_id is None:
        request_id = uuid4().hex
    elif not _is_plain(request_id):
        raise InvalidRequestError(
            f"the request's id is {request_id[:80]!r}; it must be 1 to {MAX_ID_CHARACTERS}"
            " visible ASCII characters",
            parameter="request_id" if header_id is None else HEADER,
        )
    request.scope[SCOPE_KEY] = request_id
    return request_id


class SendRequestIds:
    """A layer around the application: every response has the id of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = scope.get(SCOPE_KEY) or _find_header_id(scope) or uuid4().hex
                message["headers"].append((HEADER.encode(), request_id.encode()))
            await send(message)

        await self._app(scope, receive, send_with_id)


def _find_header_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text: str = value.decode("latin-1")
            return text if _is_plain(text) else None
    return None


def _is_plain(request_id: str) -> bool:
    return (
        0 < len(request_id) <= MAX_ID_CHARACTERS
        and request_id.isascii()
        and request_id.isprintable()
        and " " not in request_id
    )
