"""Ctrl-C between two steps instead of inside one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupts:
    """Notes Ctrl-C until it is asked for: inside a step the engine's state is half changed.

    A second Ctrl-C does not wait. Other threads than the main one get no Ctrl-C, and a handler that
    the application has installed is left in place.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
