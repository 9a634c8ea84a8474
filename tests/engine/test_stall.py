"""When an engine counts as standing still, and what is said of it."""

import logging

import pytest

from octavo.engine.messages import CoreOutputs, CoreStats, FinishedRequest, StartedRequest
from octavo.engine.stall import StallDetector
from tests.engine.requests import make_add

LIMIT_S = 60.0


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def detector(clock):
    return StallDetector(LIMIT_S, clock=clock)


def outputs(*, started=(), finished=(), **stats):
    return CoreOutputs(
        started=[StartedRequest(number, 0.0, 0) for number in started],
        finished=[FinishedRequest(number, "length") for number in finished],
        stats=CoreStats(num_blocks=64, **stats),
    )


def test_an_idle_engine_does_not_stand_still(detector, clock):
    clock.advance(1_000)
    assert (detector.stall, detector.stalled_s) == (None, 0.0)
    detector.add([make_add(1)])
    clock.advance(1)
    detector.update(outputs(started=[1], finished=[1]))
    clock.advance(1_000)
    assert (detector.stall, detector.stalled_s) == (None, 0.0)


def test_the_limit_counts_from_the_last_step_or_the_first_request(detector, clock):
    clock.advance(1_000)
    detector.add([make_add(1)])
    clock.advance(LIMIT_S - 1)
    detector.add([make_add(2)])
    assert detector.stall is None
    detector.update(outputs(started=[1]))
    clock.advance(LIMIT_S - 1)
    assert detector.stall is None
    clock.advance(1)
    assert detector.stalled_s == LIMIT_S
    assert detector.stall.startswith("no step has ended for 60 s; when the last did, ")


def test_what_the_clients_have_given_up_still_has_to_end_in_the_core(detector, clock):
    detector.add([make_add(1)])
    detector.update(outputs(started=[1], num_running=1, num_blocks_used=3))
    clock.advance(LIMIT_S)
    assert "1 requests ran, 0 waited and 3 of 64 KV blocks were in use" in detector.stall
    detector.update(outputs(finished=[1]))
    assert detector.stall is None


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (None, "for 60 s; none ever has; the oldest request, 7 (number 7), waits for the result"),
        ({"started": [7]}, "7 (number 7), runs and waits for the result of its step"),
        (
            {"oldest_waiting": 7, "oldest_waiting_reason": "needs 5 blocks"},
            "7 (number 7), waits: needs 5 blocks",
        ),
        (
            {"oldest_waiting": 9, "oldest_waiting_reason": "needs 5 blocks"},
            "7 (number 7), waits behind number 9: needs 5 blocks",
        ),
        (
            {"started": [7], "oldest_waiting": 7, "oldest_waiting_reason": "awaiting result"},
            "7 (number 7), waits: awaiting result",
        ),
        ({"started": [5, 8], "finished": [5]}, "7 (number 7), waits for the result of its first"),
    ],
)
def test_the_oldest_request_is_named_with_what_it_waits_for(detector, clock, told, sentence):
    if told is not None and 5 in told.get("finished", ()):
        detector.add([make_add(5)])
    detector.add([make_add(7), make_add(8)])
    if told is not None:
        detector.update(outputs(**told))
    clock.advance(LIMIT_S)
    assert sentence in detector.stall


def test_a_stall_is_logged_once_and_so_is_its_end(detector, clock, caplog):
    caplog.set_level(logging.INFO)
    detector.add([make_add(1)])
    assert detector.check() == LIMIT_S
    clock.advance(20)
    assert detector.check() == LIMIT_S - 20
    clock.advance(LIMIT_S)
    for _ in range(3):
        assert detector.check() == LIMIT_S
        clock.advance(LIMIT_S)
    detector.update(outputs(started=[1]))
    detector.update(outputs())
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "1 (number 1)" in caplog.messages[0]
    assert caplog.messages[1] == "a step has ended after 260 s: the engine goes on"
    clock.advance(LIMIT_S)
    detector.check()
    assert len(caplog.records) == 3


def test_nothing_is_expected_of_a_dead_core(detector, clock):
    detector.add([make_add(1)])
    detector.stop()
    clock.advance(LIMIT_S)
    assert detector.stall is None


def test_nothing_is_expected_of_a_paused_core(detector, clock, caplog):
    detector.add([make_add(1)])
    detector.update(outputs(is_paused=True))
    clock.advance(10 * LIMIT_S)
    assert (detector.stall, detector.stalled_s) == (None, 0.0)
    assert detector.check() == LIMIT_S
    assert caplog.records == []


def test_the_limit_counts_from_the_end_of_a_pause(detector, clock):
    detector.add([make_add(1)])
    detector.update(outputs(is_paused=True))
    clock.advance(10 * LIMIT_S)
    detector.update(outputs())
    clock.advance(LIMIT_S - 1)
    assert detector.stall is None
    clock.advance(1)
    assert detector.stalled_s == LIMIT_S
