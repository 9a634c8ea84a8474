"""The address of a server, taken before anything else is done."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

from octavo.entrypoints.http.unix_socket import claimed_path
from octavo.entrypoints.server_settings import DEFAULT_HOST, DEFAULT_PORT, ServerSettings
from octavo.errors import ConfigError

KEEPALIVE_S = 60
"""How long a connection is silent before the kernel asks whether the client is there."""
SEND_TIMEOUT_S = 120
"""How long a client may take nothing of what is sent to it."""


@contextmanager
def open_listener(settings: ServerSettings) -> Iterator[socket.socket]:
    """Yield a socket that nobody can connect to before it listens; free its address afterwards.

    Raises:
        ConfigError: the address cannot be used.
    """
    if settings.uds is not None:
        with claimed_path(settings.uds) as listener:
            yield listener
        return
    host, port = settings.host, settings.port
    with bind(host or DEFAULT_HOST, DEFAULT_PORT if port is None else port) as listener:
        yield listener


def bind(host: str, port: int) -> socket.socket:
    """Return such a socket for an address of the network; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    # Connections inherit it: a token does not wait until the client has acknowledged the last one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_dead_clients(listener)
    try:
        _claim(listener, (host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "this is not a host"
        raise ConfigError(
            f"cannot serve on {host} port {port}: {reason}; choose others with --host and --port"
        ) from error
    return listener


def _claim(listener: socket.socket, address: tuple[str, int]) -> None:
    """Bind so that no other server can, although nobody listens yet.

    The kernel lets sockets share a port until one listens if each permits it (SO_REUSEADDR). So
    this one does only while it must: while old connections, which permit it, have the port.
    """
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def release_at_end(listener: socket.socket) -> None:
    """Let the next server have the port while connections of this one linger; before it listens."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _notice_dead_clients(listener: socket.socket) -> None:
    """Let the kernel end the connections of clients that are gone without a word, or never read."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 4)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1_000 * SEND_TIMEOUT_S)


def is_public(listener: socket.socket) -> bool:
    """Return whether other machines can reach a bound socket."""
    if listener.family == socket.AF_UNIX:
        return False
    return not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def describe_address(listener: socket.socket, *, is_encrypted: bool) -> str:
    """Return the URL, or the path, under which a bound socket is reached."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
