"""The address of a server, taken before anything else is done."""

import socket

from octavo.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that nobody can connect to before it listens; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve on {host} port {port}: {error.strerror}; choose others with --host and"
            " --port"
        ) from error
    return listener
