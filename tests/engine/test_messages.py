"""Messages between the processes: what is sent arrives, and nothing else is let in."""

import msgspec
import numpy as np
import pytest

from octavo.engine import messages
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreDied,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreReply,
    CoreStats,
    Done,
    FinishedRequest,
    FinishRequest,
    LogprobEntry,
    PauseScheduling,
    ResetPrefixCache,
    ResumeScheduling,
    StartedRequest,
    StepTimes,
    pack_ids,
    unpack_ids,
)
from octavo.executor.step import RowSampling

ENTRY = LogprobEntry(pack_ids([5, 9]), np.array([-0.5, -1.5], "<f4").tobytes(), rank=1)
SAMPLING = RowSampling(
    seed=-3,
    temperature=0.7,
    held_back_ids=(2, 7),
    logit_bias=((4, -100.0),),
    allowed_token_ids=(1, 2),
    bad_words_ids=((1, 2), (3,)),
)


def round_trip(message, kind):
    """What the other process reads."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def make_add(**changes):
    values = {
        "number": 1,
        "request_id": "a",
        "prompt": pack_ids([1, 2, 3]),
        "sampling": SAMPLING,
        "max_tokens": 4,
        "arrival_s": 0.25,
    }
    return AddRequest(**values | changes)


@pytest.mark.parametrize("ids", [[], [0], [1, 2**31 - 1], list(range(1000))])
def test_token_ids_arrive_as_they_were(ids):
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_token_ids_do_not_depend_on_the_byte_order_of_an_array():
    big_endian = np.array([1, 258], dtype=">i4")
    assert pack_ids(big_endian) == pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_read_token_ids_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        unpack_ids(pack_ids([1]))[0] = 2


@pytest.mark.parametrize(
    "message",
    [
        make_add(),
        make_add(cache_salt="tenant", private_namespace=3, eos_ids=(2,), stop_ids=(7, 8)),
        AbortRequests((1, 2, 3)),
        FinishRequest(4, "###", 17),
        ResetPrefixCache(),
        ResetPrefixCache(ticket=3),
        PauseScheduling(1),
        ResumeScheduling(),
    ],
)
def test_what_the_front_end_sends_arrives(message):
    assert round_trip(message, CoreMessage) == message


@pytest.mark.parametrize(
    "reply",
    [
        CoreInfo(128, 512, 8, 16, 345, 4, 64, "fcfs"),
        CoreOutputs(),
        CoreOutputs(
            numbers=[1, 2],
            token_ids=pack_ids([7, 8]),
            logprobs={1: ENTRY},
            prompt_logprobs={2: [ENTRY, ENTRY]},
            started=[StartedRequest(2, 1.5, 32)],
            finished=[
                FinishedRequest(1, "stop", stop_reason=7),
                FinishedRequest(2, "stop", stop_reason="###", num_retractions=2),
                FinishedRequest(3, "error", error="non-finite logits"),
            ],
            done=[Done(5), Done(6, num_blocks_dropped=7)],
            now_s=2.5,
            times=StepTimes(plan=0.5, wait=0.25),
            stats=CoreStats(
                num_running=2,
                num_retractions={"own_growth": 1},
                prefix_hits=48,
                prefix_misses={"tail": 3},
                is_paused=True,
            ),
        ),
        CoreDied("out of memory"),
    ],
)
def test_what_the_core_replies_arrives(reply):
    assert round_trip(reply, CoreReply) == reply


def test_every_message_class_is_part_of_the_protocol():
    tagged = {
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__struct_config__.tag is not None
    }
    protocol = {*CoreMessage.__args__, *CoreReply.__args__}
    assert tagged == protocol


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "AbortRequests", "numbers": "all"}),
        msgspec.msgpack.encode({"type": "AddRequest", "number": 1}),
        msgspec.msgpack.encode(CoreDied("a reply is no message")),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(data, type=CoreMessage)


def test_an_idle_decode_step_costs_few_bytes_a_row():
    numbers = list(range(100_000, 101_024))
    outputs = CoreOutputs(numbers=numbers, token_ids=pack_ids(numbers))
    assert len(msgspec.msgpack.encode(outputs)) < 10 * len(numbers)
