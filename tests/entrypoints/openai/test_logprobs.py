"""Log-probabilities that JSON cannot hold, and tokens that are no text."""

import math

import msgspec

from octavo.entrypoints.openai.logprobs import CompletionLogprobs, chat_logprobs
from octavo.outputs import CompletionOutput, Logprob


def make_answer(*positions):
    """Make an answer whose i-th token is the first id of the i-th position."""
    return CompletionOutput(0, "", [next(iter(p)) for p in positions], logprobs=list(positions))


IMPOSSIBLE = {7: Logprob(-math.inf, 3, "a"), 8: Logprob(-0.1, 1, "b"), 9: Logprob(math.nan, 2, "c")}


def test_infinity_and_nan_become_the_lowest_number():
    chat = chat_logprobs(make_answer(IMPOSSIBLE), 3, lambda _: b"x")["content"][0]
    assert chat["logprob"] == -9999.0
    assert [entry["logprob"] for entry in chat["top_logprobs"]] == [-0.1, -9999.0, -9999.0]
    columns = CompletionLogprobs(3).take(make_answer(IMPOSSIBLE))
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"b": -0.1, "c": -9999.0, "a": -9999.0}]
    assert b"null" not in msgspec.json.encode([chat, columns])


def test_chosen_token_is_reported_beside_the_most_likely_ones():
    columns = CompletionLogprobs(1).take(make_answer(IMPOSSIBLE))
    assert list(columns["top_logprobs"][0]) == ["b", "a"]
    (chat,) = chat_logprobs(make_answer(IMPOSSIBLE), 1, lambda _: b"")["content"]
    assert (chat["token"], [entry["token"] for entry in chat["top_logprobs"]]) == ("a", ["b"])


def test_part_of_a_character_has_its_own_bytes():
    answer = make_answer({5: Logprob(-1.0, 1, "\ufffd")})
    (entry,) = chat_logprobs(answer, 1, lambda token_id: b"\xf0\x9f")["content"]
    assert entry["bytes"] == [0xF0, 0x9F]


def test_offsets_go_on_from_chunk_to_chunk():
    logprobs = CompletionLogprobs(0)
    chunk = make_answer({1: Logprob(-1.0, 1, "ab")}, {2: Logprob(-1.0, 1, "c")})
    offsets = [logprobs.take(chunk)["text_offset"] for _ in range(2)]
    assert offsets == [[0, 2], [3, 5]]
