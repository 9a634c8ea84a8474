import numpy as np
import pytest

from octavo.engine.prompt import EncodedPrompt, EncodeOptions, encode_prompt
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import BOS_ID, build_tokenizer

SPM = Tokenizer(build_tokenizer())
BYTE_LEVEL = Tokenizer(build_byte_level_tokenizer())


def test_text_gets_the_tokenizers_bos_once():
    prompt = encode_prompt("hi", SPM)
    assert (prompt.token_ids.tolist(), prompt.text) == ([BOS_ID, 259, 267, 268], "hi")


@pytest.mark.parametrize(
    "prompt", [[1, 300], (1, 300), np.array([1, 300]), {"prompt_token_ids": [1, 300]}]
)
def test_token_ids_are_taken_as_they_are(prompt):
    encoded = encode_prompt(prompt, None)
    assert encoded.token_ids.tolist() == [1, 300]
    assert encoded.token_ids.dtype == np.int32
    assert encoded.text is None


def test_token_ids_win_over_their_text():
    encoded = encode_prompt({"prompt": "shown", "prompt_token_ids": [5]}, SPM)
    assert (encoded.token_ids.tolist(), encoded.text) == ([5], "shown")


def test_encoded_prompt_passes_through():
    encoded = EncodedPrompt(np.array([1], dtype=np.int32))
    assert encode_prompt(encoded, None) is encoded


def test_empty_text_is_the_bos_alone_or_refused():
    assert encode_prompt("", SPM).token_ids.tolist() == [BOS_ID]
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        encode_prompt("", BYTE_LEVEL)


@pytest.mark.parametrize(
    ("prompt", "parameter", "text"),
    [
        ([], "prompt_token_ids", "empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
        ([[1]], "prompt_token_ids", "flat list of integers"),
        ([[1], [1, 2]], "prompt_token_ids", "flat list of integers"),
        ([1.5], "prompt_token_ids", "flat list of integers"),
        ([True], "prompt_token_ids", "flat list of integers"),
        (["a"], "prompt_token_ids", "flat list of integers"),
        ([-1], "prompt_token_ids", "-1"),
        ([2**40], "prompt_token_ids", str(2**40)),
        ([2**70], "prompt_token_ids", "flat list of integers"),
        ({}, "prompt", "missing"),
        ({"prompt": 3}, "prompt", "must be a string"),
        (3, "prompt", "not int"),
        (None, "prompt", "not NoneType"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data", "no field of a prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"prompt": "a", "cache_salt": "s" * 1025}, "cache_salt", "1 to 1024"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt", "string"),
        ("a\ud83d", "prompt", "at position 1, .* no character"),
        ({"prompt": "\udfff"}, "prompt", "at position 0"),
        ({"prompt": "\udfff", "prompt_token_ids": [5]}, "prompt", "at position 0"),
        ({"prompt": "a", "cache_salt": "\ud83d"}, "cache_salt", "at position 0"),
    ],
)
def test_malformed_prompt_is_refused_by_name(prompt, parameter, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        encode_prompt(prompt, SPM)
    assert caught.value.parameter == parameter


def test_salt_is_kept():
    assert encode_prompt({"prompt": "a", "cache_salt": "s"}, SPM).cache_salt == "s"


@pytest.mark.parametrize("prompt", ["hi", {"prompt": "hi"}])
def test_text_without_a_tokenizer_is_refused(prompt):
    with pytest.raises(InvalidRequestError, match="give prompt_token_ids"):
        encode_prompt(prompt, None)


def cut(prompt, tokenizer=SPM, **options):
    encoded = encode_prompt(prompt, tokenizer, EncodeOptions(**options))
    return encoded.token_ids.tolist(), encoded.text


LETTERS = [267, 268, 269, 270]  # h i j k, as SPM encodes them behind <s> and a space


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("hijk", {"max_tokens": 6}, ([1, 259, *LETTERS], "hijk")),
        ("hijk", {"max_tokens": 3}, ([1, *LETTERS[-2:]], None)),
        ("hijk", {"max_tokens": 3, "truncation_side": "right"}, ([1, 259, 267], None)),
        ("hijk", {"max_tokens": 2, "add_special_tokens": False}, (LETTERS[-2:], None)),
        ("hijk", {"max_tokens": 1}, (LETTERS[-1:], None)),
        ([1, 5, 6, 7], {"max_tokens": 2}, ([6, 7], None)),
        ([1, 5, 6, 7], {"max_tokens": 2, "truncation_side": "right"}, ([1, 5], None)),
        ([1, 5, 6, 7], {"max_tokens": 4}, ([1, 5, 6, 7], None)),
        ("hi", {"add_special_tokens": False}, ([259, 267, 268], "hi")),
    ],
)
def test_prompt_is_cut_to_a_length_and_a_text_keeps_its_bos(prompt, options, expected):
    assert cut(prompt, **options) == expected


def test_token_ids_are_cut_in_a_dict_too_and_keep_their_salt():
    prompt = {"prompt_token_ids": [1, 2, 3], "cache_salt": "s"}
    encoded = encode_prompt(prompt, None, EncodeOptions(max_tokens=1))
    assert (encoded.token_ids.tolist(), encoded.cache_salt) == ([3], "s")


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    too_long = "a" * (4 * BYTE_LEVEL.max_characters_per_token + 1)
    with pytest.raises(InvalidRequestError, match="more than 4 tokens") as caught:
        encode_prompt(too_long, BYTE_LEVEL, limit=4)
    assert caught.value.reason_code == "prompt_too_long"


def test_text_that_may_fit_is_encoded():
    long = "a" * (4 * BYTE_LEVEL.max_characters_per_token)
    assert len(encode_prompt(long, BYTE_LEVEL, limit=4).token_ids) > 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tokenizer", [SPM, BYTE_LEVEL], ids=["spm", "byte-level"])
def test_cutting_far_longer_texts_keeps_the_same_tokens(tokenizer, side):
    text = "the quick brown fox " * 2_000
    for max_tokens in (1, 2, 7, 40):
        options = EncodeOptions(max_tokens=max_tokens, truncation_side=side)
        at_once = encode_prompt(text, tokenizer, options, limit=50).token_ids.tolist()
        assert at_once == encode_prompt(text, tokenizer, options).token_ids.tolist()
        assert len(at_once) == max_tokens
