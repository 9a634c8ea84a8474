"""The keys that open a server's API: where they come from, and whether a client has one.

A message never shows a key, and nothing keeps one: only their digests stay.
"""

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from octavo.config import Environment
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of the keys. All of one length: the time of a comparison says nothing of a key."""

    _digests: tuple[bytes, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self._digests)

    def accept(self, key: bytes) -> bool:
        """Return whether this is one of the keys, after looking at all of them."""
        digest = sha256(key).digest()
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(known, digest)
        return is_known


def read_api_keys(settings: ServerSettings, environment: Environment) -> ApiKeys | None:
    """Return the keys of the options or, without any, of the environment; None: there are none.

    Raises:
        ConfigError: a key could not be sent in a header, a place for keys has none, or there are
            none although a setting needs them.
    """
    keys = [*_read_options(settings)] or [*_read_environment(environment)]
    if settings.enable_admin_endpoints and not keys:
        raise ConfigError(
            "enable_admin_endpoints is on, but there is no API key: whoever reaches the server"
            " could pause it; give one with --api-key-file or OCTAVO_API_KEY"
        )
    digests = dict.fromkeys(sha256(key.encode()).digest() for key in keys)
    return ApiKeys(tuple(digests)) if digests else None


def read_client_key(option: str | None, environment: Environment) -> str | None:
    """Return the key that a client sends: the one it is given, or the first of the environment.

    Raises:
        ConfigError: it could not be sent in a header.
    """
    keys = _read_environment(environment) if option is None else _check([option], "api_key")
    return next(keys, None)


def _read_options(settings: ServerSettings) -> Iterator[str]:
    yield from _check(settings.api_key, "api_key")
    if settings.api_key_file is not None:
        yield from _read_file(settings.api_key_file)


def _read_file(path: str) -> Iterator[str]:
    place = f"api_key_file is {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{place}, which cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}, which is not a text file") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{place}, which has no key: write one on each line")
    yield from _check(keys, f"{place}, which")


def _read_environment(environment: Environment) -> Iterator[str]:
    """Yield the keys of the first variable that is set; a set one without a key is a mistake."""
    if environment.api_keys is not None:
        yield from _check(environment.api_keys.split(","), "OCTAVO_API_KEY")
    elif environment.vllm_api_key is not None:
        yield from _check([environment.vllm_api_key], "VLLM_API_KEY")


def _check(keys: Iterable[str], place: str) -> Iterator[str]:
    for key in map(str.strip, keys):
        if not key:
            raise ConfigError(f"{place} has an empty key: without keys, leave it out altogether")
        if not (key.isascii() and key.isprintable()) or set(key) & {" ", ","}:
            raise ConfigError(
                f"{place} has a key with a space, a comma or a character outside of ASCII, which"
                " cannot be told apart in a header: use letters, digits and -._~+/="
            )
        yield key
