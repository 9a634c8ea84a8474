"""A server over a core that echoes prompts, for all tests that only read from it."""

import pytest

from tests.live_server import running_server


@pytest.fixture(scope="package")
def server():
    with running_server() as live:
        yield live
