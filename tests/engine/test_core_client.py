import pytest

from octavo.engine.core_client import InProcessClient
from octavo.engine.messages import AbortRequests, FinishRequest, ResetPrefixCache
from octavo.errors import EngineDeadError
from tests.engine.requests import make_add, make_core
from tests.fake_executor import Faults


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("end", "reason"), [(AbortRequests((0,)), "abort"), (FinishRequest(0, "stop", 1), "stop")]
)
def test_end_from_outside_is_reported_when_nothing_else_is_left(lag, end, reason):
    client = InProcessClient(make_core(lag=lag).core)
    client.send([make_add(0)])
    while not client.receive().numbers:
        pass
    client.send([end])
    assert [report.reason for report in client.receive().finished] == [reason]


def test_reset_needs_no_step():
    run = make_core()
    client = InProcessClient(run.core)
    client.send([make_add(0, 9, max_tokens=1)])
    client.receive()
    assert run.scheduler.block_manager.pool.num_cached > 0
    client.send([ResetPrefixCache()])
    assert run.scheduler.block_manager.pool.num_cached == 0


def test_dead_core_refuses_everything():
    client = InProcessClient(make_core(executor_options={"faults": Faults(result=[0])}).core)
    client.send([make_add(0)])
    for use in (client.receive, client.receive, lambda: client.send([make_add(1)])):
        with pytest.raises(EngineDeadError, match="the engine core died"):
            use()


def test_core_that_was_shut_down_says_so_however_often():
    client = InProcessClient(make_core().core)
    client.send([make_add(0)])
    client.shutdown()
    client.shutdown()
    for use in (client.receive, lambda: client.send([make_add(1)])):
        with pytest.raises(EngineDeadError, match="was shut down: make a new one"):
            use()


def test_shutdown_does_not_hide_a_death():
    client = InProcessClient(make_core(executor_options={"faults": Faults(result=[0])}).core)
    client.send([make_add(0)])
    with pytest.raises(EngineDeadError, match="died"):
        client.receive()
    client.shutdown()
    with pytest.raises(EngineDeadError, match="died"):
        client.receive()
