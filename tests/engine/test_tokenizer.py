import json
import logging

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tokenizer_loader import load_tokenizer
from octavo.errors import ConfigError
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, build_tokenizer
from tests.full_disk import largest_file

SPM = Tokenizer(build_tokenizer())
BYTE_LEVEL = Tokenizer(build_byte_level_tokenizer())


@pytest.fixture
def spm_folder(tmp_path):
    folder = tmp_path / "model"
    build_tokenizer().save_pretrained(folder)
    return folder


def test_loaded_tokenizer_is_the_saved_one(spm_folder, tmp_path):
    tokenizer = load_tokenizer(spm_folder, tmp_path / "cache")
    assert tokenizer.encode("the a") == SPM.encode("the a")
    assert (tokenizer.num_tokens, tokenizer.eos_id) == (VOCAB_SIZE, EOS_ID)
    assert not (tmp_path / "cache").exists()


def test_special_tokens_are_added_on_request():
    assert SPM.encode("hi") == [BOS_ID, 259, 267, 268]
    assert SPM.encode("hi", add_special_tokens=False) == [259, 267, 268]


def test_long_text_is_encoded_without_a_warning():
    SPM.hf_tokenizer.model_max_length = 4
    assert len(SPM.encode("a" * 50)) == 51


@pytest.mark.parametrize("tokenizer", [SPM, BYTE_LEVEL], ids=["spm", "byte-level"])
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer):
    text = "the café 日本 😀"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, token_ids))
    assert joined.decode().removeprefix(" ") == text


def test_token_texts_keep_spaces_and_show_special_tokens():
    (the_id,) = SPM.hf_tokenizer.convert_tokens_to_ids(["▁the"])
    assert [SPM.token_text(token_id) for token_id in (the_id, EOS_ID)] == [" the", "</s>"]
    assert SPM.token_text(SPM.encode("😀")[-1]) == "\ufffd"
    assert SPM.token_text(VOCAB_SIZE + 5) == ""


def test_added_token_that_is_no_byte_string_is_plain_text():
    token_ids = BYTE_LEVEL.encode("he<tool 日本>")
    assert [BYTE_LEVEL.token_text(token_id) for token_id in token_ids] == ["he", "<tool 日本>"]


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_tokenizer_that_cannot_be_loaded_is_refused_in_one_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=f"cannot load a tokenizer from {tmp_path}") as caught:
        load_tokenizer(tmp_path, tmp_path / "cache")
    assert "\n" not in str(caught.value)


class StandIn:
    """Stands for transformers' conversion from GGUF, which takes seconds; counts its calls."""

    def __init__(self, monkeypatch):
        self.num_conversions = 0
        self.before_conversion = lambda: None
        self._load = AutoTokenizer.from_pretrained
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", self.from_pretrained)

    def from_pretrained(self, folder, *, gguf_file=None, local_files_only):
        if gguf_file is None:
            return self._load(folder, local_files_only=local_files_only)
        self.num_conversions += 1
        before, self.before_conversion = self.before_conversion, lambda: None
        before()
        return build_tokenizer()


def test_tokenizer_made_from_gguf_is_kept_until_the_file_changes(monkeypatch, tmp_path):
    stand_in = StandIn(monkeypatch)
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    tokenizers = [load_tokenizer(path, cache) for _ in range(2)]
    assert stand_in.num_conversions == 1
    assert tokenizers[0].encode("the") == tokenizers[1].encode("the")
    path.write_bytes(b"another")
    load_tokenizer(path, cache)
    assert stand_in.num_conversions == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_a_kept_tokenizer_that_is_damaged_is_made_anew(
    name, content, monkeypatch, tmp_path, caplog
):
    stand_in = StandIn(monkeypatch)
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    load_tokenizer(path, cache)
    (file,) = cache.rglob(name)
    file.write_bytes(content)
    for _ in range(2):
        assert load_tokenizer(path, cache).encode("the") == SPM.encode("the")
    assert caplog.text.count("is damaged and will be made anew") == 1
    assert stand_in.num_conversions == 2


@pytest.mark.parametrize("cache", ["model.gguf", "c" * 300])
def test_cache_that_cannot_be_written_costs_only_time(cache, monkeypatch, tmp_path, caplog):
    StandIn(monkeypatch)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(path, cache_dir=tmp_path / cache)
    assert tokenizer.encode("the") == SPM.encode("the")
    assert "is not cached" in caplog.text


def test_two_that_convert_at_once_keep_one_tokenizer(monkeypatch, tmp_path, caplog):
    stand_in = StandIn(monkeypatch)
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    stand_in.before_conversion = lambda: load_tokenizer(path, cache)
    with caplog.at_level(logging.INFO):
        load_tokenizer(path, cache)
    assert stand_in.num_conversions == 2
    load_tokenizer(path, cache)
    assert stand_in.num_conversions == 2
    assert len(list((cache / "tokenizers").iterdir())) == 1
    assert "is not cached" not in caplog.text


def test_full_disk_costs_only_time(monkeypatch, tmp_path, caplog):
    StandIn(monkeypatch)
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"one")
    with caplog.at_level(logging.INFO), largest_file(100):
        tokenizer = load_tokenizer(path, cache)
    assert tokenizer.encode("the") == SPM.encode("the")
    assert caplog.text.count("is not cached") == 1
    assert list((cache / "tokenizers").iterdir()) == []


def test_tokenizer_file_of_an_unknown_decoder_still_loads(spm_folder, tmp_path):
    path = spm_folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["decoder"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    }
    path.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(spm_folder, tmp_path)
    assert tokenizer.decode(tokenizer.encode("the a the")) == "the a the"


def test_tokens_that_every_text_gets_are_counted_on_both_sides():
    assert SPM.num_added_tokens == (1, 0)
    assert BYTE_LEVEL.num_added_tokens == (0, 0)
    both = build_tokenizer()
    both.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
    )
    assert Tokenizer(both).num_added_tokens == (1, 1)


@pytest.mark.parametrize("tokenizer", [SPM, BYTE_LEVEL], ids=["spm", "byte-level"])
def test_no_token_stands_for_more_characters_than_said(tokenizer):
    texts = map(tokenizer.token_text, range(tokenizer.num_tokens))
    assert max(map(len, texts)) <= tokenizer.max_characters_per_token
