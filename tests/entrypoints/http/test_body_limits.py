"""Bodies that would hold everybody up are refused before they are read; long texts are not."""

import json
import time

import pytest

from octavo.entrypoints.http.body_limits import (
    MAX_BODY_BYTES,
    MAX_BODY_DEPTH,
    MAX_BODY_VALUES,
    check_num_values,
)
from octavo.entrypoints.http.errors import HttpError

COMPLETION = {"prompt": "ab", "max_tokens": 2}
PATHS = ["/v1/completions", "/v1/chat/completions"]


def fill(piece, num_bytes=MAX_BODY_BYTES - 100):
    """Repeat a piece of a list until a body is that long."""
    return b'{"x": [' + piece * (num_bytes // len(piece)) + b"0]}"


HEAVY = {
    "numbers": fill(b"1,"),
    "lists": fill(b"[],"),
    "objects": fill(b"{},"),
    "nested lists": fill(b"[" * 90 + b"]" * 90 + b","),
    "keys": fill(b'{"":0},'),
    "texts": fill(b'"",'),
}
BROKEN = {
    "open text": b'{"x": "' + rb"\"" * (MAX_BODY_BYTES // 2 - 100),
    "quotes": b'"' * MAX_BODY_BYTES,
    "backslashes": b'["' + b"\\" * (MAX_BODY_BYTES - 100),
    "digits": b'{"n": ' + b"9" * (MAX_BODY_BYTES - 100) + b"}",
    "lists": b"[" * (MAX_BODY_VALUES // 4),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_body_of_too_many_values_is_413_at_once(server, kind):
    start_s = time.monotonic()
    reply = server.post("/v1/completions", HEAVY[kind])
    assert time.monotonic() - start_s < 3
    assert (reply.status, reply.json["error"]["reason_code"]) == (413, "body_too_large")
    assert server.post("/v1/completions", COMPLETION).status == 200


@pytest.mark.parametrize("kind", BROKEN)
def test_long_body_that_is_broken_is_400_at_once(server, kind):
    start_s = time.monotonic()
    assert server.post("/v1/completions", BROKEN[kind]).status == 400
    assert time.monotonic() - start_s < 3


@pytest.mark.parametrize(
    "text",
    [
        "a, " * (MAX_BODY_BYTES // 3 - 100),
        json.dumps({"key": [1, 2, {}]}) * 150_000,
        "\\" * (MAX_BODY_BYTES // 2 - 100),
        '"' * (MAX_BODY_VALUES - 100),
    ],
)
def test_long_text_counts_as_one_value(text):
    check_num_values(bytearray(json.dumps({"prompt": text}).encode()))


@pytest.mark.parametrize(
    ("item", "weight"), [(b"1,", 1), (b'"a",', 1), (b"[],", 4), (b"{},", 4), (b'"a":1,', 4)]
)
def test_each_kind_of_value_has_its_weight(item, weight):
    most = MAX_BODY_VALUES // weight
    check_num_values(bytearray(item * most))
    with pytest.raises(HttpError, match="more than 1048576 values"):
        check_num_values(bytearray(item * (most + 1)))


@pytest.mark.parametrize("path", PATHS)
def test_body_that_is_declared_too_long_is_not_waited_for(server, path):
    connection = server.connect()
    connection.putrequest("POST", path)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(2**62))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_of_a_body_is_bounded(server, path, opening, closing):
    for depth, is_read in ((MAX_BODY_DEPTH, True), (MAX_BODY_DEPTH + 1, False)):
        inner = opening * (depth - 1) + b"0" + closing * (depth - 1)
        reply = server.post(path, b'{"temperature": "hot", "x": ' + inner + b"}")
        assert reply.status == 400
        assert reply.json["error"]["param"] == ("temperature" if is_read else None)


def test_wrong_value_of_any_size_is_shown_in_short(server):
    reply = server.post("/v1/completions", {"prompt": "a", "stop": {"a" * 10_000: [1] * 10_000}})
    assert reply.status == 400
    assert len(reply.json["error"]["message"]) < 400
