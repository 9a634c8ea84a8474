"""Log-probabilities that JSON cannot hold, and tokens that are no text."""

import math

import msgspec
import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.openai.logprobs import (
    CompletionLogprobs,
    TextOffsets,
    chat_logprobs,
    name_by_id,
    name_by_text,
    prompt_logprobs,
)
from octavo.outputs import CompletionOutput, Logprob
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import build_tokenizer


def make_answer(*positions):
    """Make an answer whose i-th token is the first id of the i-th position."""
    return CompletionOutput(0, "", [next(iter(p)) for p in positions], logprobs=list(positions))


def describe(answer, num_alternatives, *, name_token=name_by_text):
    columns = CompletionLogprobs(num_alternatives, name_token=name_token)
    return columns.describe_answer(answer, TextOffsets(None))


IMPOSSIBLE = {7: Logprob(-math.inf, 3, "a"), 8: Logprob(-0.1, 1, "b"), 9: Logprob(math.nan, 2, "c")}


def test_infinity_and_nan_become_the_lowest_number():
    chat = chat_logprobs(make_answer(IMPOSSIBLE), 3, lambda _: b"x")["content"][0]
    assert chat["logprob"] == -9999.0
    assert [entry["logprob"] for entry in chat["top_logprobs"]] == [-0.1, -9999.0, -9999.0]
    columns = describe(make_answer(IMPOSSIBLE), 3)
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"b": -0.1, "c": -9999.0, "a": -9999.0}]
    assert b"null" not in msgspec.json.encode([chat, columns])


def test_chosen_token_is_reported_beside_the_most_likely_ones():
    columns = describe(make_answer(IMPOSSIBLE), 1)
    assert list(columns["top_logprobs"][0]) == ["b", "a"]
    (chat,) = chat_logprobs(make_answer(IMPOSSIBLE), 1, lambda _: b"")["content"]
    assert (chat["token"], [entry["token"] for entry in chat["top_logprobs"]]) == ("a", ["b"])


def test_part_of_a_character_has_its_own_bytes():
    answer = make_answer({5: Logprob(-1.0, 1, "\ufffd")})
    (entry,) = chat_logprobs(answer, 1, lambda token_id: b"\xf0\x9f")["content"]
    assert entry["bytes"] == [0xF0, 0x9F]


def test_tokens_may_be_called_by_their_ids():
    columns = describe(make_answer(IMPOSSIBLE), 1, name_token=name_by_id)
    assert columns["tokens"] == ["token_id:7"]
    assert columns["top_logprobs"] == [{"token_id:8": -0.1, "token_id:7": -9999.0}]
    answer = make_answer(IMPOSSIBLE)
    (entry,) = chat_logprobs(answer, 1, lambda _: b"a", name_token=name_by_id)["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:7", [97])
    assert entry["top_logprobs"][0]["token"] == "token_id:8"


def test_tokens_without_a_text_are_called_by_their_ids():
    answer = make_answer({7: Logprob(-1.0, 2), 8: Logprob(-0.5, 1)})
    columns = describe(answer, 1)
    assert columns["tokens"] == ["token_id:7"]
    assert b"null" not in msgspec.json.encode(columns)


def test_prompt_logprobs_have_vllms_form():
    scores = [None, {5: Logprob(-math.inf, 9, "a")}]
    entry = {"5": {"logprob": -9999.0, "rank": 9, "decoded_token": "a"}}
    assert prompt_logprobs(scores) == [None, entry]


TEXT = "the café 😀 日本 ab"
TOKENIZERS = [Tokenizer(build_tokenizer()), Tokenizer(build_byte_level_tokenizer())]


@pytest.mark.parametrize("chunk", [1, 2, 1000])
@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["spm", "byte-level"])
def test_offsets_show_where_each_token_begins(tokenizer, chunk):
    ids = tokenizer.encode(TEXT)
    walk = TextOffsets(tokenizer.create_decoder())
    parts = [ids[begin : begin + chunk] for begin in range(0, len(ids), chunk)]
    offsets = [offset for part in parts for offset in walk.take(part)]
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        token = tokenizer.token_text(token_id)
        is_shown = "\ufffd" not in token and token_id not in tokenizer.special_ids
        if is_shown and offset:
            assert TEXT[offset:].startswith(token)
    assert walk.position == len(TEXT)


def test_offsets_inside_a_character_are_those_of_the_character():
    tokenizer = TOKENIZERS[0]
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    walk = TextOffsets(tokenizer.create_decoder())
    assert walk.take(ids) == [0, 1, 1, 1, 1, 2]
