"""A network that was rounded once is read from its copy, and never from a damaged one."""

import dataclasses
import logging
import os
import time

import gguf
import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import rounded_copy, rounding
from octavo.models.config_files import load_config
from octavo.models.rounded_copy import ABANDONED_S, MAX_COPIES, load_rounded
from octavo.models.rounding import can_round
from tests.models.gguf_files import write_gguf
from tests.models.oracle import attend_in_float32, source_of

IDS = torch.tensor([1, 259, 285, 344, 0, 100])
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not can_round(name), reason=f"no {name} here"))
    for name in ("int4", "int8")
]


@pytest.fixture
def source(tiny_spm, tmp_path):
    path = write_gguf(tiny_spm, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    return dataclasses.replace(source_of(path, "gguf"), cache_dir=tmp_path / "cache")


@pytest.fixture
def tells_rounding(monkeypatch):
    """A list that gets an entry whenever a network is loaded and rounded."""
    rounded = []
    load_model = rounded_copy.load_model

    def load(source, *args, **settings):
        rounded.append(source)
        return load_model(source, *args, **settings)

    monkeypatch.setattr(rounded_copy, "load_model", load)
    return rounded


def compute(source, name):
    model = load_rounded(source, load_config(source), name)
    model.pack()
    hidden = model(IDS, attend_in_float32)
    return model.compute_logits(hidden)


def copies(source):
    return list((source.cache_dir / "rounded").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_computes_the_same_to_the_last_bit(name, source, tells_rounding):
    first, second = compute(source, name), compute(source, name)
    assert torch.equal(first, second)
    assert len(tells_rounding) == 1
    assert torch.equal(first, compute(dataclasses.replace(source, cache_dir=None), name))


@pytest.mark.parametrize("name", NAMES)
def test_an_untied_head_is_copied_too(name, tiny_padded_vocab, tmp_path, tells_rounding):
    source = dataclasses.replace(source_of(tiny_padded_vocab), cache_dir=tmp_path)
    assert torch.equal(compute(source, name), compute(source, name))
    assert len(tells_rounding) == 1


def cut(content):
    return content[: len(content) // 2]


def flip_last_bit(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def make_empty(content):
    return (2).to_bytes(8, "little") + b"{}"


def flip_in_checksums(content):
    place = content.index(b"norm.weight")
    return content[:place] + b"M" + content[place + 1 :]


@pytest.mark.parametrize("name", NAMES[:1])
@pytest.mark.parametrize(
    "damage", [cut, flip_last_bit, flip_in_checksums, lambda content: b"", make_empty]
)
def test_a_damaged_copy_is_told_of_and_made_anew(name, damage, source, tells_rounding, caplog):
    expected = compute(source, name)
    (path,) = copies(source)
    path.write_bytes(damage(path.read_bytes()))
    assert torch.equal(compute(source, name), expected)
    assert "is damaged and will be made anew" in caplog.text
    assert torch.equal(compute(source, name), expected)
    assert len(tells_rounding) == 2


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_copy_belongs_to_what_it_was_made_of(name, source, tells_rounding, monkeypatch):
    compute(source, name)
    path = source.path.rename(source.path.with_name("other name.gguf"))
    moved = dataclasses.replace(source, path=path)
    compute(moved, name)
    assert len(tells_rounding) == 1, "neither a file's name nor its date matters"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    compute(moved, name)
    monkeypatch.setattr(rounded_copy, "_describe_cpu", lambda: "another CPU")
    compute(moved, name)
    assert len(tells_rounding) == len(copies(source)) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_not_read_by_a_cpu_that_lacks_the_instructions(name, source, monkeypatch):
    compute(source, name)
    monkeypatch.setattr(rounding, "can_round", lambda name: False)
    with pytest.raises(ConfigError, match="needs a CPU with AVX"):
        compute(source, name)


@pytest.mark.parametrize("name", NAMES[:1])
@pytest.mark.parametrize("folder", ["file", "f" * 300])
def test_a_cache_that_cannot_be_written_costs_only_time(name, folder, source, caplog):
    source.cache_dir.with_name("file").write_bytes(b"no folder")
    source = dataclasses.replace(source, cache_dir=source.cache_dir.with_name(folder))
    with caplog.at_level(logging.INFO):
        compute(source, name)
    assert "are not kept" in caplog.text


@pytest.mark.parametrize("name", NAMES[:1])
def test_large_files_are_not_copied(name, source, monkeypatch):
    monkeypatch.setattr(rounded_copy, "MAX_SOURCE_BYTES", source.path.stat().st_size - 1)
    compute(source, name)
    assert not source.cache_dir.exists()


def write_copies(folder, *, num_copies):
    """Write copies with names in their order, each an hour after the one in front."""
    paths = [folder / f"{index}.safetensors" for index in range(num_copies)]
    now = time.time()
    for hours_ago, path in zip(range(num_copies, 0, -1), paths, strict=True):
        rounded_copy._write(path, {"norm.weight": torch.ones(2)})
        os.utime(path, (now, now - 3600 * hours_ago))
    return paths


def test_copies_that_were_used_last_are_kept(tmp_path):
    paths = write_copies(tmp_path, num_copies=MAX_COPIES)
    assert rounded_copy._read(paths[0]) is not None
    new = tmp_path / "new.safetensors"
    rounded_copy._write(new, {"norm.weight": torch.ones(2)})
    assert set(tmp_path.iterdir()) == {new, paths[0], *paths[2:]}


@pytest.mark.parametrize(("age_s", "is_removed"), [(ABANDONED_S - 60, False), (ABANDONED_S, True)])
def test_what_a_process_left_half_written_is_removed_when_it_is_old(age_s, is_removed, tmp_path):
    left = tmp_path / "tmp1"
    left.mkdir()
    (left / "a.safetensors").write_bytes(b"half")
    os.utime(left, (0, time.time() - age_s))
    write_copies(tmp_path, num_copies=1)
    assert left.exists() != is_removed


def test_others_that_remove_at_the_same_time_do_no_harm(tmp_path, monkeypatch):
    paths = write_copies(tmp_path, num_copies=MAX_COPIES)
    getmtime = os.path.getmtime

    def remove_and_ask(path):
        paths[0].unlink(missing_ok=True)
        return getmtime(path)

    monkeypatch.setattr(os.path, "getmtime", remove_and_ask)
    new = tmp_path / "new.safetensors"
    rounded_copy._write(new, {"norm.weight": torch.ones(2)})
    assert rounded_copy._read(new) is not None
    assert all(path.exists() for path in paths[1:])
