"""Certificates of the server and of its clients."""

import ssl
from typing import NoReturn

from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError


def create_tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return what connections are encrypted with; None without a certificate.

    Raises:
        ConfigError: a file cannot be used, or the key is not that of the certificate.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, settings.ssl_certfile, settings.ssl_keyfile)
    if settings.ssl_ca_certs is not None:
        _load_authorities(context, settings.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    if settings.ssl_ciphers is not None:
        _set_ciphers(context, settings.ssl_ciphers)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    _require_readable("ssl_certfile", certificate)
    if key is not None:
        _require_readable("ssl_keyfile", key)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        place = f"ssl_certfile is {certificate}" + (f" and ssl_keyfile {key}" if key else "")
        raise ConfigError(f"{place}: {_describe(error)}") from error


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    _require_readable("ssl_ca_certs", path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"ssl_ca_certs is {path}, which holds no certificates in PEM") from error


def _set_ciphers(context: ssl.SSLContext, ciphers: str) -> None:
    try:
        context.set_ciphers(ciphers)
    except ssl.SSLError as error:
        raise ConfigError(f"ssl_ciphers is {ciphers!r}, of which OpenSSL knows none") from error


def _require_readable(name: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} is {path}, which cannot be read: {error.strerror}") from error


def _refuse_password() -> NoReturn:
    """OpenSSL would ask for it on a terminal that nobody may be looking at."""
    raise ConfigError("the private key has a password: give a key without one")


def _describe(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return "these are not a certificate and its private key in PEM"
