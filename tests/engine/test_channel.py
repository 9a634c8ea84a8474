"""Messages between two ends of a socket, both held by this process."""

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.channel import LENGTH, MAX_RECEIVED_BYTES, Channel

LARGE = bytes(range(256)) * 2**13  # 2 MiB: more than a kernel takes at once


@pytest.fixture
def ends():
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def receive(channel, count, sender=None):
    """Take ``count`` messages; what the sender has kept leaves meanwhile, as on an event loop."""
    messages = []
    while len(messages) < count:
        if sender is not None:
            sender.flush()
        messages += channel.receive()
    return messages


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.binary(max_size=20), st.integers(0, 2**19).map(bytes)), max_size=6))
def test_messages_of_any_length_come_whole_and_in_order(messages):
    sender, receiver = (Channel(end) for end in socket.socketpair())
    for message in messages:
        sender.send(message)
    assert receive(receiver, len(messages), sender) == messages
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_a_message_comes_when_its_last_byte_does():
    raw, end = socket.socketpair()
    channel = Channel(end)
    for byte in LENGTH.pack(3) + b"ab":
        raw.sendall(bytes([byte]))
        assert channel.receive() == []
    raw.sendall(b"c" + LENGTH.pack(0))
    assert channel.receive() == [b"abc", b""]
    raw.close()
    channel.close()


def test_nothing_to_receive_is_no_reason_to_wait(ends):
    assert ends[0].receive() == []


def test_a_sender_does_not_wait_for_a_reader(ends):
    sender, receiver = ends
    sender.send(LARGE)
    sender.send(b"last")
    assert sender.has_unsent
    assert receive(receiver, 2, sender) == [LARGE, b"last"]
    assert not sender.has_unsent


def test_a_turn_takes_in_a_bounded_part(ends):
    sender, receiver = ends
    sender.send(bytes(MAX_RECEIVED_BYTES))
    assert receiver.receive() == []


def test_two_that_wait_for_each_other_both_get_rid_of_everything(ends):
    def exchange(channel, received):
        channel.send(LARGE)
        while not received or channel.has_unsent:
            channel.wait()
            received += channel.receive()

    results = [], []
    threads = [
        threading.Thread(target=exchange, args=pair) for pair in zip(ends, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == ([LARGE], [LARGE])


def test_what_was_sent_before_the_end_is_read_before_the_end(ends):
    sender, receiver = ends
    receiver.send(b"never read")
    sender.send(b"last word")
    sender.close()
    assert receiver.receive() == [b"last word"]
    with pytest.raises(EOFError):
        receiver.receive()
    with pytest.raises(EOFError):
        receiver.send(b"to nobody")


def test_closed_channel_sends_and_receives_nothing(ends):
    ends[0].close()
    with pytest.raises(EOFError):
        ends[0].send(b"")
    with pytest.raises(EOFError):
        ends[0].receive()


def test_waiting_ends_with_the_connection(ends):
    ends[0].send(LARGE)
    ends[1].close()
    ends[0].wait()
    with pytest.raises(EOFError):
        ends[0].receive()


def test_closing_delivers_what_was_kept(ends):
    sender, receiver = ends
    sender.send(LARGE)
    received = []
    thread = threading.Thread(target=lambda: received.extend(receive(receiver, 1)))
    thread.start()
    sender.close(delivery_timeout_s=20)
    thread.join(timeout=20)
    assert received == [LARGE]


def test_closing_waits_for_no_reader_longer_than_it_may(ends):
    ends[0].send(LARGE)
    start_s = time.monotonic()
    ends[0].close(delivery_timeout_s=0.1)
    assert 0.1 <= time.monotonic() - start_s < 10
