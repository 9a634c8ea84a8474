"""A GGUF file gives the network that it was converted from, or says what is wrong with it."""

import contextlib
import os
import random
import sys

import gguf
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, ModelLoadError
from octavo.models.config_files import load_config, load_generation_config
from octavo.models.gguf import GGUFCheckpoint
from octavo.models.gguf_header import read_gguf_header
from tests.checkpoints import build_random_model, tiny_config
from tests.models.gguf_files import write_gguf
from tests.models.oracle import load, source_of


@pytest.fixture
def write(tiny_spm, tmp_path):
    """Write tiny_spm as a GGUF file, with changes."""

    def write_changed(**changes):
        return write_gguf(tiny_spm, tmp_path / "tiny.gguf", **changes)

    return write_changed


def config_of(path):
    return load_config(source_of(path, "gguf"))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_file_gives_the_weights_it_was_made_from(model_type, changes, tmp_path):
    build_random_model(tiny_config(model_type, **changes)).save_pretrained(tmp_path)
    original = load(source_of(tmp_path))
    converted = load(source_of(write_gguf(tmp_path, tmp_path / "tiny.gguf"), "gguf"))
    for (name, value), other in zip(
        original.named_parameters(), converted.parameters(), strict=True
    ):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_block_formats_are_dequantised_as_the_gguf_package_does(kind, write, tiny_spm):
    kind = gguf.GGMLQuantizationType[kind]
    ours = load(source_of(write(kind=kind), "gguf")).layers[1].mlp.down_proj.matrix.weight
    exact = load(source_of(tiny_spm)).layers[1].mlp.down_proj.matrix.weight.numpy()
    assert np.array_equal(ours.numpy(), gguf.dequantize(gguf.quantize(exact, kind), kind))


def test_config_is_read_from_the_metadata(write, tiny_spm):
    ours, original = config_of(write()), load_config(source_of(tiny_spm))
    assert (ours.bos_token_id, ours.eos_token_ids, ours.dtype) == (1, (2, 3), "bfloat16")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
        assert vars_of(ours)[name] == vars_of(original)[name]
    assert (ours.num_kv_heads, ours.head_dim, ours.rope) == (2, 16, original.rope)


def vars_of(config):
    return {name: config.__getattribute__(name) for name in config.__slots__}


def test_eos_ids_are_in_the_generation_config_too(write):
    assert load_generation_config(source_of(write(), "gguf")).eos_token_ids == (2, 3)


def test_header_has_the_vocabulary_as_text(write):
    assert read_gguf_header(write()).metadata["tokenizer.ggml.tokens"][-1] == "é"


def test_llama3_scaling_is_read_from_its_tensor(write):
    divisors = np.arange(1, 9, dtype=np.float32)
    path = write(tensors={"rope_freqs.weight": divisors})
    assert config_of(path).rope.divisors == tuple(divisors.tolist())
    load(source_of(path, "gguf"))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read_from_the_metadata(kind, write):
    fields = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    config = config_of(write(fields=fields))
    assert (config.rope.kind, config.rope.factor) == (kind, 4.0)
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.dimension_count", 8),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 64),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value, write):
    with pytest.raises(ConfigError, match=f"has {name.removeprefix('llama.')} "):
        config_of(write(fields={name: value}))


def test_unknown_family_is_refused_with_those_that_are_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'gemma3'; supported are llama, qwen2, qwen3"):
        config_of(tmp_path / "other.gguf")


def test_part_of_a_split_file_is_refused(write):
    with pytest.raises(ModelLoadError, match="one part of several"):
        config_of(write(fields={"split.count": 2}))


def test_file_cut_anywhere_inside_its_header_is_named(write):
    path = write()
    alignment = 32
    for size in range(read_gguf_header(path).data_offset - alignment, 0, -97):
        os.truncate(path, size)
        with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not a whole GGUF file"):
            config_of(path)


def test_damaged_header_never_breaks_the_reader(write):
    path = write()
    data = bytearray(path.read_bytes())
    end = read_gguf_header(path).data_offset
    randomness = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data[: end + 64])
        damaged[randomness.randrange(end)] = randomness.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ConfigError):
            config_of(path)
            GGUFCheckpoint(read_gguf_header(path))


def test_file_cut_inside_a_tensor_is_named(write):
    path = write()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is cut: tensor .* ends at byte"):
        load(source_of(path, "gguf"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(40)])
def test_file_that_is_no_gguf_is_named(content, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not a whole GGUF file"):
        config_of(path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"cannot read .*none\.gguf"):
        config_of(tmp_path / "none.gguf")


def test_unknown_tensor_is_named(write):
    path = write(tensors={"blk.0.ffn_gate_inp.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelLoadError, match=r"has tensor blk\.0\.ffn_gate_inp\.weight, which"):
        load(source_of(path, "gguf"))


def test_without_the_gguf_package_the_extra_is_named(write, monkeypatch):
    source = source_of(write(), "gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install octavo\[demo\]"):
        load(source)
