"""Every weight is written exactly once, or the start fails with the name of what is wrong."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError, ModelLoadError
from octavo.models.config import GenerationConfig
from octavo.models.config_files import load_config, load_generation_config
from octavo.models.loader import load_model, resolve_dtype
from tests.models.oracle import CPU, load, source_of

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def broken(tiny_spm, tmp_path):
    """A copy of tiny_spm to break, and a function that changes its tensors."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_spm, folder)

    def change(edit):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return folder, change


def weights(model):
    return dict(model.named_parameters())


def assert_equal_weights(one, other):
    assert weights(one).keys() == weights(other).keys()
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


def test_shards_are_put_together(tiny_spm, tiny_sharded):
    assert_equal_weights(load(source_of(tiny_sharded)), load(source_of(tiny_spm)))


def test_missing_shard_is_named(tiny_sharded, tmp_path):
    folder = tmp_path / "missing-shard"
    shutil.copytree(tiny_sharded, folder)
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name} is missing"):
        load(source_of(folder))


def test_file_cut_in_half_is_named(broken):
    folder, _ = broken
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a whole safetensors"):
        load(source_of(folder))


def test_renamed_tensor_is_named(broken):
    folder, change = broken
    change(lambda tensors: tensors.update(other=tensors.pop(Q_PROJ)))
    with pytest.raises(ModelLoadError, match=f"lacks tensor {Q_PROJ}, which"):
        load(source_of(folder))


def test_many_missing_tensors_are_counted(broken):
    folder, change = broken
    change(lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    with pytest.raises(ModelLoadError, match="and 3 more, which"):
        load(source_of(folder))


def test_extra_tensor_is_named(broken):
    folder, change = broken
    change(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=r"has tensor model\.layers\.0.*bias, which"):
        load(source_of(folder))


def test_transposed_tensor_is_named_with_both_shapes(broken):
    folder, change = broken
    name = "model.layers.0.mlp.up_proj.weight"
    change(lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(ModelLoadError) as refusal:
        load(source_of(folder))
    assert f"tensor {name}" in str(refusal.value)
    assert "has shape (64, 128) instead of (128, 64)" in str(refusal.value)


def test_quantised_tensor_is_named(broken):
    folder, change = broken
    change(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelLoadError, match=f"{Q_PROJ} .* stored as F8_E4M3"):
        load(source_of(folder))


def test_tensor_in_two_files_is_named(broken):
    folder, _ = broken
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    with pytest.raises(ModelLoadError, match="in another file beside it"):
        load(source_of(folder))


def test_folder_without_weights_is_named(broken):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"broken has no \.safetensors weights"):
        load(source_of(folder))


def test_stored_rotation_tables_are_ignored(broken, tiny_spm):
    folder, change = broken
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(lambda tensors: tensors.update({name: torch.ones(8)}))
    assert_equal_weights(load(source_of(folder)), load(source_of(tiny_spm)))


def test_head_stored_beside_tied_embeddings_is_ignored(tiny_tied, tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(tiny_tied, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert_equal_weights(load(source_of(folder)), load(source_of(tiny_tied)))


def test_weights_are_converted_to_the_wanted_type(tiny_spm):
    exact, rounded = load(source_of(tiny_spm)), load(source_of(tiny_spm), dtype=torch.bfloat16)
    for name, value in weights(rounded).items():
        assert torch.equal(value, weights(exact)[name].bfloat16())


def test_weights_beyond_the_limit_are_refused_before_they_are_read(broken):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    source = source_of(folder)
    with pytest.raises(ConfigError, match=r"weights take 0\.00 GiB, and 0\.00 GiB .* are free"):
        load_model(
            source, load_config(source), dtype=torch.float32, device=CPU, memory_limit=400_000
        )


def test_network_that_no_machine_can_hold_is_refused(broken):
    folder, _ = broken
    path = folder / "config.json"
    wide = {"hidden_size": 2**20, "intermediate_size": 2**20, "head_dim": 2**18}
    for changes in ({"vocab_size": 2**31 - 1, "hidden_size": 2**20}, wide):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        with pytest.raises(ConfigError, match="no memory for the network's weights"):
            load(source_of(folder))


def test_loading_leaves_the_default_type_alone(tiny_spm):
    load(source_of(tiny_spm), dtype=torch.float16)
    assert torch.get_default_dtype() == torch.float32


def test_dummy_weights_follow_from_the_seed(tiny_spm):
    first, same, other = (load(source_of(tiny_spm, "dummy", seed=seed)) for seed in (1, 1, 2))
    assert_equal_weights(first, same)
    assert not torch.equal(first.lm_head.matrix.weight, other.lm_head.matrix.weight)


def test_dummy_weights_need_no_weight_file(broken):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    model = load(source_of(folder, "dummy"))
    assert all(value.isfinite().all() for value in model.parameters())
    assert (model.norm.weight == 1).all()


def test_unknown_architecture_is_refused_with_those_that_are_known(broken):
    folder, _ = broken
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    # Only the architecture may be blamed, however strange the rest.
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_head": raw["head_dim"]}))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is not supported; .*LlamaForCausalLM"):
        load_config(source_of(folder))


def test_eos_ids_of_the_generation_config_reach_the_config(broken):
    folder, _ = broken
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_config(source_of(folder)).eos_token_ids == (2, 9)


def test_absent_generation_config_sets_nothing(broken):
    folder, _ = broken
    (folder / "generation_config.json").unlink()
    assert load_generation_config(source_of(folder)) == GenerationConfig()


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", torch.device("cuda"), torch.bfloat16),
        ("float16", CPU, torch.float16),
        ("float32", torch.device("cuda"), torch.float32),
    ],
)
def test_auto_type_depends_on_the_device(name, device, expected, tiny_spm):
    assert resolve_dtype(name, load_config(source_of(tiny_spm)), device) == expected
