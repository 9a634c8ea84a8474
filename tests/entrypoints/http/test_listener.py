"""Addresses: ports and sockets in the file system, who may have them, and when they are free."""

import os
import socket
from pathlib import Path

import pytest

from octavo.entrypoints.http.listener import (
    bind,
    describe_address,
    is_public,
    open_listener,
    release_at_end,
)
from octavo.entrypoints.server_settings import ServerSettings
from octavo.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "octavo.sock"


def claim(path):
    return open_listener(ServerSettings(uds=str(path)))


def refuse(path):
    """Return the sentence with which a path is refused."""
    with pytest.raises(ConfigError) as refused, claim(path):
        pass
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_taken_port_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1 port {port}"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("has_old_connections", [False, True])
def test_port_of_a_server_that_still_loads_is_refused(has_old_connections):
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        if has_old_connections:
            leave_connection(listener)
    with bind("127.0.0.1", port), pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", port)


def leave_connection(listener):
    """Serve a connection and close it first, so that the kernel keeps its port for a while."""
    release_at_end(listener)
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client:
        listener.accept()[0].close()
        assert client.recv(1) == b""


def test_bound_port_refuses_until_the_server_listens():
    with open_listener(ServerSettings(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "a" * 70, "::zz", "1::"])
def test_host_that_is_none_is_a_config_error(host):
    with pytest.raises(ConfigError, match=f"cannot serve on {host} port 0: "):
        bind(host, 0)


def test_empty_host_does_not_mean_every_network():
    with pytest.raises(ConfigError, match=r"host is empty; .* 0\.0\.0\.0"):
        ServerSettings(host="")


def test_addresses_are_told_as_clients_write_them(path):
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert describe_address(listener, is_encrypted=False) == f"http://127.0.0.1:{port}"
        assert describe_address(listener, is_encrypted=True) == f"https://127.0.0.1:{port}"
    with bind("::1", 0) as listener:
        port = listener.getsockname()[1]
        assert describe_address(listener, is_encrypted=False) == f"http://[::1]:{port}"
    with claim(path) as listener:
        assert describe_address(listener, is_encrypted=False) == f"unix:{path}"


def test_addresses_that_other_machines_reach_are_known(path):
    for host, is_open in (("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)):
        with bind(host, 0) as listener:
            assert is_public(listener) is is_open
    with claim(path) as listener:
        assert not is_public(listener)


def test_path_is_there_while_it_is_claimed(path):
    with claim(path):
        assert path.is_socket()
    assert not path.exists()


def test_path_that_the_dead_left_is_taken(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with claim(path) as listener:
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_path_of_a_server_that_listens_is_refused(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "a server has it" in refuse(path)
        assert path.is_socket()


def test_path_of_a_server_that_still_loads_is_refused(path, monkeypatch):
    with claim(path):
        assert "a server has it" in refuse(path)
        monkeypatch.chdir(path.parent)
        with pytest.raises(ConfigError, match="a server has it"), claim(path.name):
            pass
        assert path.is_socket()


def test_path_of_a_successor_stays(path):
    with claim(path):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_what_is_no_socket_is_left_alone(path):
    path.write_text("precious")
    assert "a file that is not a socket" in refuse(path)
    assert path.read_text() == "precious"
    assert "a file that is not a socket" in refuse(path.parent)


def test_paths_that_cannot_be_are_refused(tmp_path):
    assert "too long" in refuse(tmp_path / ("a" * 120))
    assert "No such file" in refuse(tmp_path / "missing" / "octavo.sock")
    assert "Not a directory" in refuse(Path(__file__) / "octavo.sock")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refuse(tmp_path / "octavo.sock")


@pytest.mark.parametrize("other", [{"host": "127.0.0.1"}, {"port": 8000}])
def test_path_and_port_exclude_each_other(other):
    with pytest.raises(ConfigError, match="uds stands in the place of host and port"):
        ServerSettings(uds="x", **other)
