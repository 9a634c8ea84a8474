import tracemalloc

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from octavo.engine.detokenizer import Detokenizer, StopStrings
from octavo.engine.tokenizer import Tokenizer
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, build_tokenizer

SPM = Tokenizer(build_tokenizer())
BYTE_LEVEL = Tokenizer(build_byte_level_tokenizer())
TEXTS = [
    "The cat, the hat:  two spaces.",
    "naïve café",
    "日本語のテキスト",
    "👨‍👩‍👧 family and 😀",
    "ď“x”👨‍👩‍👧日本",
    "\n\ttabs\r\n",
]


def stream(tokenizer, token_ids, *, prompt_ids=(), stops=None, **options):
    """Return the pieces that are released after each token, then the rest."""
    decoder = tokenizer.create_decoder(**options)
    decoder.prime(prompt_ids)
    detokenizer = Detokenizer(decoder, stops)
    pieces = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    return [*pieces, detokenizer.take()]


def spm_bytes(token_ids):
    """Return what the ids spell, independently of the code under test."""
    names = SPM.hf_tokenizer.convert_ids_to_tokens(token_ids)
    return b"".join(
        b""
        if token_id in (0, 1, 2)
        else bytes([int(name[3:5], 16)])
        if name.startswith("<0x")
        else name.replace("▁", " ").encode()
        for token_id, name in zip(token_ids, names, strict=True)
    )


@pytest.mark.parametrize("tokenizer", [SPM, BYTE_LEVEL], ids=["spm", "byte-level"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip_in_whole_characters(tokenizer, text):
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@given(st.lists(st.integers(0, BYTE_LEVEL.num_tokens - 1), max_size=40), st.booleans())
def test_stream_of_random_byte_level_tokens_joins_to_the_tokenizers_decoding(token_ids, skip):
    whole = BYTE_LEVEL.hf_tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)) == whole


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_stream_of_random_byte_fallback_tokens_joins_to_their_bytes(token_ids):
    whole = spm_bytes(token_ids).decode(errors="replace")
    assert "".join(stream(SPM, token_ids)) == whole.removeprefix(" ")


@given(st.text(alphabet="the ab▁é日😀", max_size=20), st.booleans())
def test_stream_of_valid_byte_fallback_tokens_joins_to_the_tokenizers_decoding(text, skip):
    token_ids = SPM.encode(text)
    whole = SPM.hf_tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(stream(SPM, token_ids, skip_special_tokens=skip)) == whole


@given(st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=20), st.integers(0, 20))
def test_output_continues_the_prompts_text(token_ids, num_prompt_tokens):
    prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    text = "".join(stream(SPM, output, prompt_ids=[BOS_ID, *prompt]))
    before = SPM.decode(prompt)
    assume(not before.endswith("\ufffd"))  # the output may complete the prompt's last character
    assert before + text == SPM.decode(token_ids)


def test_first_space_is_stripped_at_the_beginning_of_a_text_only():
    (the_id,) = SPM.hf_tokenizer.convert_tokens_to_ids(["▁the"])
    assert stream(SPM, [the_id, the_id]) == ["the", " the", ""]
    assert stream(SPM, [the_id], prompt_ids=[BOS_ID]) == ["the", ""]
    assert stream(SPM, [the_id], prompt_ids=[BOS_ID, the_id]) == [" the", ""]
    assert stream(SPM, [EOS_ID, the_id], skip_special_tokens=False) == ["</s>", " the", ""]


def test_special_tokens_are_text_only_on_request():
    token_ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>")
    assert "".join(stream(BYTE_LEVEL, token_ids)) == "hello"
    shown = "".join(stream(BYTE_LEVEL, token_ids, skip_special_tokens=False))
    assert shown == "<|im_start|>hello<|im_end|>"


def test_ids_without_a_token_have_no_text():
    assert stream(BYTE_LEVEL, [BYTE_LEVEL.num_tokens + 7]) == ["", ""]


def test_incomplete_character_at_the_end_is_one_replacement_in_every_mode():
    (letter, *_), emoji = SPM.encode("a", add_special_tokens=False), SPM.encode("😀")[-4:]
    token_ids = [letter, *emoji[:2]]
    detokenizer = Detokenizer(SPM.create_decoder())
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.take() == "".join(stream(SPM, token_ids)) == SPM.decode(token_ids)
    assert SPM.decode(token_ids) == "a\ufffd"


def test_character_begun_in_the_prompt_is_completed_in_the_output():
    emoji = SPM.encode("😀")[-4:]
    assert stream(SPM, emoji[2:], prompt_ids=[BOS_ID, *emoji[:2]]) == ["", "😀", ""]


def test_other_decoders_are_streamed_through_a_window():
    pieces = ["[UNK]", "un", "##aff", "##able", "day"]
    backend = FastTokenizer(
        models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert stream(tokenizer, [1, 2, 3, 4, 1]) == ["un", "aff", "able", " day", " un", ""]
    assert stream(tokenizer, [3, 4], prompt_ids=[1, 2]) == ["able", " day", ""]


def push_all(stop_strings, tokens, *, include_in_output=False, min_tokens=0):
    """Return the released pieces and the stop string that ended the text."""
    stops = StopStrings(stop_strings, include_in_output=include_in_output, min_tokens=min_tokens)
    pieces = []
    for token in tokens:
        pieces.append(stops.push(token))
        if stops.found is not None:
            return pieces, stops.found
    return [*pieces, stops.flush()], None


def test_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    pieces, found = push_all(["def"], "abcdefghij")
    assert (pieces, found) == (["a", "b", "c", "", "", ""], "def")
    pieces, found = push_all(["dex"], "abcdef")
    assert (pieces, found) == (["a", "b", "c", "", "", "def", ""], None)


def test_stop_string_in_the_output_is_released_whole():
    pieces, found = push_all(["def"], "abcdefg", include_in_output=True)
    assert (pieces, found) == (["a", "b", "c", "", "", "def"], "def")


def test_stop_string_that_ends_first_wins_however_the_text_is_split():
    for tokens in ("abcdefghij", ["abcde", "fghij"], ["abcdefghij"]):
        pieces, found = push_all(["ij", "cd"], tokens)
        assert ("".join(pieces), found) == ("ab", "cd")
    assert push_all(["d", "bcd"], ["abcde"]) == (["a"], "bcd")


def test_held_text_is_flushed_at_the_end():
    pieces, found = push_all(["ef"], "abcde")
    assert ("".join(pieces), pieces[-1], found) == ("abcde", "e", None)


def test_stop_string_before_min_tokens_passes_as_text():
    assert push_all(["b"], "abab", min_tokens=3) == (["a", "b", "a", ""], "b")
    assert push_all(["b"], "abab", min_tokens=2) == (["a", ""], "b")
    assert push_all(["ab"], "aabbab", min_tokens=4) == (["", "a", "ab", "b", "", ""], "ab")


@given(
    st.text(alphabet="abc", max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_cut_does_not_depend_on_the_tokens(text, stop_strings, lengths):
    tokens, rest = [], text
    for length in lengths:
        tokens.append(rest[:length])
        rest = rest[length:]
    pieces, found = push_all(stop_strings, tokens)
    expected, expected_found = push_all(stop_strings, list(text))
    assert ("".join(pieces), found) == ("".join(expected), expected_found)


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=7), min_size=1, max_size=3),
    st.integers(0, 4),
    st.booleans(),
)
def test_text_is_cut_and_held_as_defined(tokens, stop_strings, min_tokens, include):
    stops = StopStrings(stop_strings, include_in_output=include, min_tokens=min_tokens)
    text = released = ""
    for count, token in enumerate(tokens, 1):
        unseen = range(len(text) + 1, len(text) + len(token) + 1)
        text += token
        released += stops.push(token)
        ends = [(end, -len(s), s) for s in stop_strings for end in unseen if text[:end].endswith(s)]
        if ends and count >= min_tokens:
            end, _, found = min(ends)
            assert stops.found == found
            assert released == text[: end if include else end - len(found)]
            return
        beginnings = [stop[:n] for stop in stop_strings for n in range(len(stop))]
        num_held = max(len(part) for part in beginnings if text.endswith(part))
        assert (released, stops.found) == (text[: len(text) - num_held], None)
    assert released + stops.flush() == text


class CountingString(str):
    """Counts how many of its characters are looked at."""

    num_reads = 0

    def __getitem__(self, key):
        self.num_reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("text", ["a" * 5000, ("a" * 500 + "c") * 10, ("ab" * 250 + "b") * 10, "c"])
@pytest.mark.parametrize("stop", ["a" * 2000 + "b", "ab" * 1000 + "c"])
def test_time_is_linear_in_the_text_however_long_the_stop_string(text, stop):
    stop = CountingString(stop)
    stops = StopStrings([stop], include_in_output=False, min_tokens=0)
    for start in range(0, len(text), 4):
        stops.push(text[start : start + 4])
    assert stop.num_reads <= 10 * len(text)


def test_memory_is_linear_in_the_stop_string():
    stop = "ab" * 10_000
    tracemalloc.start()
    stops = StopStrings([stop], include_in_output=False, min_tokens=0)
    stops.push(stop[:-1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(stop)


def test_text_ends_at_the_stop_string_even_inside_a_token():
    stops = StopStrings(["h"], include_in_output=False, min_tokens=0)
    detokenizer = Detokenizer(BYTE_LEVEL.create_decoder(), stops)
    found = [detokenizer.append(token_id) for token_id in BYTE_LEVEL.encode("a hell😀")[:2]]
    detokenizer.finish()
    assert found == [None, "h"]
    assert detokenizer.take() == "a "
