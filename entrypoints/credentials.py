"""What a server reads at its start of keys and certificates."""

from ssl import SSLContext
from typing import NamedTuple

from octavo.config import Environment
from octavo.entrypoints.api_keys import ApiKeys, read_api_keys
from octavo.entrypoints.server_settings import ServerSettings
from octavo.entrypoints.tls import create_tls_context


class Credentials(NamedTuple):
    """Who may come in, and as whom the server shows itself."""

    api_keys: ApiKeys | None = None
    """None lets everybody in."""
    tls: SSLContext | None = None
    """None does not encrypt."""


def read_credentials(settings: ServerSettings, environment: Environment) -> Credentials:
    """Read what the settings name.

    Raises:
        ConfigError: it cannot be used.
    """
    return Credentials(read_api_keys(settings, environment), create_tls_context(settings))
