"""However the network cuts what a client sends, the same requests get the same answers."""

import random
import re

import pytest

from tests.entrypoints.http.test_connection import (
    BODY,
    CHUNKED,
    HEAD,
    LENGTH,
    RawClient,
    as_chunk,
)

OFFER = b"connection: Upgrade\r\nupgrade: h2c\r\n"
IN_CHUNKS = as_chunk(BODY[:7]) + as_chunk(BODY[7:]).replace(b"\r\n", b";a=b\r\n", 1)
REQUESTS = [
    (HEAD + LENGTH + b"\r\n" + BODY, b"200"),
    (HEAD + OFFER + LENGTH + b"\r\n" + BODY, b"200"),
    (HEAD + CHUNKED + IN_CHUNKS + b"0\r\n\r\n", b"200"),
    (HEAD + OFFER + CHUNKED + IN_CHUNKS + b"0\r\na: b\r\n\r\n", b"200"),
    (HEAD + b"content-length: 5\r\n\r\n[1,2]", b"400"),
    (b"POST /nowhere HTTP/1.1\r\ncontent-length: 5\r\n\r\nabcde", b"404"),
    (b"GET /health HTTP/1.1\r\n" + OFFER + b"\r\n", b"200"),
    (b"HEAD /version HTTP/1.1\r\n\r\n", b"200"),
    (b"\r\n\r\nGET /version HTTP/1.1\r\n\r\n", b"200"),
]
LAST = b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
def test_answers_do_not_depend_on_the_pieces(server, seed):
    choose = random.Random(seed)
    requests = choose.choices(REQUESTS, k=8)
    data = b"".join(request for request, _ in requests) + LAST
    cuts = sorted([0, *choose.choices(range(len(data)), k=choose.randint(0, 30)), len(data)])
    with RawClient(server) as client:
        client.send(*(data[cuts[i] : cuts[i + 1]] for i in range(len(cuts) - 1)))
        statuses = re.findall(rb"HTTP/1.1 (\d+) ", client.read())
    assert statuses == [*(status for _, status in requests), b"200"]
