"""Lets only those requests pass that have an API key."""

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.api_keys import ApiKeys
from octavo.entrypoints.http.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""What load balancers and orchestrators ask for: whether the server works, and nothing else."""


class RequireApiKey:
    """A layer around the application; 401 for every path but the open ones, known or not."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, root_path: str = "") -> None:
        self._app = app
        self._keys = keys
        self._open_paths = {root_path + path for path in OPEN_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or hand the request on."""
        if scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        key = _find_bearer_token(scope)
        if key is not None and self._keys.accept(key):
            return await self._app(scope, receive, send)
        refusal = error_response(
            401,
            "there is no API key: send the header Authorization: Bearer KEY"
            if key is None
            else "the API key is not one of this server's",
            headers={"www-authenticate": "Bearer"},
        )
        return await refusal(scope, receive, send)


def _find_bearer_token(scope: Scope) -> bytes | None:
    """Return what the one authorization header carries; None if it is not one bearer token."""
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(b" ")
    return token.strip() or None if scheme.lower() == b"bearer" else None
