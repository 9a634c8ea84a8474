"""TLS: certificates of the server and its clients, and files that are none."""

import ssl
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from octavo.entrypoints.server_settings import ServerSettings
from octavo.entrypoints.tls import create_tls_context
from octavo.errors import ConfigError
from tests.live_server import TIMEOUT_S, running_server

FOLDER = Path(__file__).parents[1] / "certificates"
SERVER = {"ssl_certfile": str(FOLDER / "server.crt"), "ssl_keyfile": str(FOLDER / "server.key")}
AUTHORITY = str(FOLDER / "authority.crt")


def connect(live, *, client=None):
    context = ssl.create_default_context(cafile=AUTHORITY)
    if client is not None:
        context.load_cert_chain(FOLDER / f"{client}.crt", FOLDER / f"{client}.key")
    return HTTPSConnection("127.0.0.1", live.port, timeout=TIMEOUT_S, context=context)


def ask(live, path="/health", **options):
    connection = connect(live, **options)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_server_shows_its_certificate_and_says_https():
    with running_server(**SERVER) as live:
        connection = connect(live)
        connection.request("GET", "/docs")
        assert connection.getresponse().status == 200
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
        connection.close()
        with pytest.raises(OSError, match=r"."):
            live.get("/health")
        live.get = lambda path: None  # what waits for the end asks without TLS


def test_client_certificates_can_be_required():
    with running_server(**SERVER, ssl_ca_certs=AUTHORITY, ssl_cert_reqs=2) as live:
        assert ask(live, client="client") == 200
        with pytest.raises(OSError, match=r"."):
            ask(live)


def test_one_file_may_hold_certificate_and_key(tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes((FOLDER / "server.key").read_bytes() + (FOLDER / "server.crt").read_bytes())
    with running_server(ssl_certfile=str(both), ssl_ciphers="ECDHE+AESGCM") as live:
        assert ask(live) == 200


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ssl_keyfile": SERVER["ssl_keyfile"]}, "but there is no ssl_certfile"),
        ({"ssl_ca_certs": AUTHORITY}, "but there is no ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "but there is no ssl_certfile"),
        ({"ssl_ciphers": "HIGH"}, "but there is no ssl_certfile"),
        ({**SERVER, "ssl_cert_reqs": 1}, "without ssl_ca_certs"),
        ({**SERVER, "ssl_certfile": "/missing.crt"}, "ssl_certfile is /missing.crt, which cannot"),
        ({**SERVER, "ssl_keyfile": "/missing.key"}, "ssl_keyfile is /missing.key, which cannot"),
        ({**SERVER, "ssl_keyfile": str(FOLDER)}, "Is a directory"),
        ({**SERVER, "ssl_ca_certs": "/missing.crt"}, "ssl_ca_certs is /missing.crt, which cannot"),
        ({**SERVER, "ssl_ca_certs": SERVER["ssl_keyfile"]}, "which holds no certificates"),
        ({**SERVER, "ssl_certfile": SERVER["ssl_keyfile"]}, "are not a certificate and its"),
        ({**SERVER, "ssl_keyfile": SERVER["ssl_certfile"]}, "are not a certificate and its"),
        ({**SERVER, "ssl_keyfile": None}, "are not a certificate and its private key"),
        ({**SERVER, "ssl_certfile": __file__}, "are not a certificate and its private key"),
        ({**SERVER, "ssl_keyfile": str(FOLDER / "client.key")}, "not that of the certificate"),
        ({**SERVER, "ssl_keyfile": str(FOLDER / "locked.key")}, "has a password"),
        ({**SERVER, "ssl_ciphers": "NONE-SUCH"}, "of which OpenSSL knows none"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(settings, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        create_tls_context(ServerSettings(**settings))
    assert "\n" not in str(refused.value)
