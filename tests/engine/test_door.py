"""Caps of the waiting queue, and when a refused client should come back."""

import pytest

from octavo.engine.door import DEFAULT_RETRY_S, MAX_RETRY_S, RATE_WINDOW_S, Door, QueueCaps
from octavo.errors import QueueFullError


def make_door(max_requests=None, max_tokens=None, *, waiting=()):
    door = Door(QueueCaps(max_requests, max_tokens))
    for number, num_tokens in enumerate(waiting):
        door.enter(number, num_tokens)
    return door


def refuse(door, num_requests=1, num_tokens=10, now_s=0.0):
    with pytest.raises(QueueFullError) as caught:
        door.check(num_requests, num_tokens, now_s=now_s)
    return caught.value


def test_without_caps_everything_passes():
    make_door(waiting=[10] * 1_000).check(1_000, 10**9, now_s=0.0)


def test_requests_pass_up_to_the_cap_and_not_beyond():
    door = make_door(3, waiting=[10, 10])
    door.check(1, 10, now_s=0.0)
    error = refuse(door, num_requests=2)
    assert error.reason_code == "queue_full_requests"
    assert "2 requests wait and 2 more would exceed max_queued_requests (3)" in str(error)


def test_tokens_pass_up_to_the_cap_and_not_beyond():
    door = make_door(max_tokens=100, waiting=[60])
    door.check(1, 40, now_s=0.0)
    error = refuse(door, num_tokens=41)
    assert error.reason_code == "queue_full_tokens"
    assert "60 prompt tokens wait" in str(error)


def test_an_empty_queue_lets_a_request_larger_than_the_cap_pass():
    make_door(1, 100).check(4, 1_000, now_s=0.0)


@pytest.mark.parametrize("how", ["start", "leave"])
def test_what_starts_or_ends_makes_room(how):
    door = make_door(2, waiting=[10, 20])
    if how == "start":
        door.start(0, now_s=1.0)
    else:
        door.leave(0)
    assert (door.num_requests, door.num_tokens) == (1, 20)
    door.check(1, 10, now_s=1.0)


def test_leaving_after_the_start_counts_once():
    door = make_door(waiting=[10])
    door.start(0, now_s=0.0)
    door.leave(0)
    assert (door.num_requests, door.num_tokens) == (0, 0)


def test_the_time_to_retry_follows_the_rate_at_which_requests_start():
    door = make_door(10, waiting=[10] * 30)
    assert refuse(door).retry_after_s == DEFAULT_RETRY_S
    for number in range(10):
        door.start(number, now_s=float(number))
    # 10 started in 10 s; 20 wait, so 11 must start before one more may enter.
    assert refuse(door, now_s=10.0).retry_after_s == 11.0


def test_the_time_to_retry_follows_tokens_where_those_are_capped():
    door = make_door(max_tokens=1_000, waiting=[500] * 4)
    door.start(0, now_s=0.0)
    # 500 tokens started in 5 s; 1,500 wait and 100 come, so 600 must start.
    assert refuse(door, num_tokens=100, now_s=5.0).retry_after_s == 6.0


def test_old_starts_say_nothing_about_the_rate():
    door = make_door(1, waiting=[10] * 3)
    door.start(0, now_s=0.0)
    assert refuse(door, now_s=RATE_WINDOW_S + 1).retry_after_s == DEFAULT_RETRY_S


def test_the_time_to_retry_is_bounded():
    door = make_door(max_tokens=10, waiting=[1, 10**9])
    door.start(0, now_s=0.0)
    assert refuse(door, now_s=1.0).retry_after_s == MAX_RETRY_S
