"""The main loop of a core: when it waits, and what it does while there is nothing to do."""

from octavo.engine.core_process import serve_core
from tests.echo_core import EchoCore


class Inbox:
    """A channel that has no messages, and hangs up when a core waits for some."""

    def __init__(self):
        self.waited = []

    def send(self, reply):
        """Nobody reads it."""

    def receive(self, *, block):
        self.waited.append(block)
        return None if block else []


def test_a_core_prepares_until_nothing_is_left_and_looks_for_messages_in_between():
    core, inbox = EchoCore(), Inbox()
    left = [True, True, False]
    core.prepare = lambda: left.pop(0)
    serve_core(core, inbox)
    assert inbox.waited == [False, False, True]


def test_a_core_with_work_prepares_nothing(monkeypatch):
    core, inbox = EchoCore(), Inbox()
    work = [True, True, False]
    monkeypatch.setattr(EchoCore, "has_work", property(lambda core: work.pop(0)))
    monkeypatch.setattr(core, "step", lambda: None)
    core.prepare = lambda: bool(work)
    serve_core(core, inbox)
    assert inbox.waited == [False, False, True]
