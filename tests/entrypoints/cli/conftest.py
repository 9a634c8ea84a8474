"""Servers that say anything."""

import socket
import threading

import pytest


@pytest.fixture
def serve_bytes():
    """Return a function that answers one request with given bytes and returns the URL."""
    threads = []

    def serve(data):
        listener = socket.create_server(("127.0.0.1", 0))

        def answer():
            with listener, listener.accept()[0] as connection:
                connection.recv(65_536)
                connection.sendall(data)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for thread in threads:
        thread.join(10)
