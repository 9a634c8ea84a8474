"""A device that can be made to stand still."""

import threading

from tests.fake_executor import FakeExecutor

MAX_WAIT_S = 60


class GatedExecutor(FakeExecutor):
    """Hands out no result while its gate is closed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._gate = threading.Event()
        self.open()

    def open(self):
        self._gate.set()

    def close(self):
        self._gate.clear()

    def read(self, handle):
        assert self._gate.wait(MAX_WAIT_S), "the gate was not opened again"
        return super().read(handle)
