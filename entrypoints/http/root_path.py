"""Serves the application under a path of its own, behind a proxy or without one."""

from starlette.types import ASGIApp, Receive, Scope, Send


class ShowUnderPath:
    """A layer around the application for proxies that cut the path off and for those that do not.

    Within it every path has the prefix, as ASGI wants it; the router cuts it off again.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on with its whole path."""
        path = scope["path"]
        if not path.startswith(f"{self._root_path}/"):
            path = self._root_path + path
        await self._app({**scope, "path": path, "root_path": self._root_path}, receive, send)
