"""Networks in 8-bit floats compute what the plain network with their dequantised weights does."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError, ModelLoadError
from octavo.models.config_files import load_config
from octavo.models.layers.parallel import Shard
from octavo.models.loader import load_model
from octavo.models.ops.eight_bits import FP8, INT8, dequantize_rows, quantize_rows
from octavo.models.quantization import ONLINE, quantize_online
from octavo.models.registry import get_builder
from tests.checkpoints import build_random_model, tiny_config
from tests.models.fp8_checkpoints import (
    KINDS,
    QWEN,
    compressed,
    quantize_checkpoint,
    write_scheme,
)
from tests.models.oracle import CPU, compute_logits, load, source_of
from tests.models.ranks import ThreadRanks

IDS = torch.tensor([1, 259, 285, 344, 0, 100])
BY_BLOCK = "one scale a block"
EXACT_KINDS = [kind for kind in KINDS if kind != BY_BLOCK]


def load_online(folder, load_format="safetensors", *, shard=None):
    source = source_of(folder, load_format)
    config = replace(load_config(source), quantization=ONLINE)
    return load_model(source, config, dtype=torch.float32, device=CPU, shard=shard)


def find_matrices(model):
    """Return what each quantised matrix means, by the name of its weight."""
    parameters = dict(model.named_parameters())
    return {
        name: dequantize_rows(values, parameters[name[: -len("weight")] + "scale"], torch.float32)
        for name, values in parameters.items()
        if values.itemsize == 1
    }


def make_oracle(folder, matrices):
    """Return the plain network with these values in the place of its own."""
    model = load(source_of(folder))
    parameters = dict(model.named_parameters())
    for name, values in matrices.items():
        parameters[name].copy_(values)
    return model


def test_quantised_while_loading_it_computes_with_the_nearest_values(tiny_spm):
    model = load_online(tiny_spm)
    matrices = find_matrices(model)
    oracle = make_oracle(tiny_spm, matrices)
    assert torch.equal(compute_logits(model, IDS), compute_logits(oracle, IDS))
    plain = dict(load(source_of(tiny_spm)).named_parameters())
    for name, values in matrices.items():
        assert_close_to_quantised(values, plain[name], has_integers=name.startswith("lm_head"))


def assert_close_to_quantised(values, exact, *, has_integers=False):
    """Check the bounds that models/ops/eight_bits.py states."""
    largest = exact.abs().amax(dim=1, keepdim=True)
    bound = torch.maximum(exact.abs() * 2**-4, largest / 448 * 2**-10)
    if has_integers:
        bound = largest / 127 / 2
    assert ((values - exact).abs() <= bound * (1 + 1e-4)).all()


def test_layers_and_an_untied_embedding_become_floats_and_the_head_integers(tiny_spm, tiny_tied):
    for folder, embedding in ((tiny_spm, FP8), (tiny_tied, INT8)):
        model = load_online(folder)
        weights = [weight for weight in model.parameters() if weight.dim() > 1]
        assert all(weight.itemsize == 1 for weight in weights)
        assert {weight.dtype for weight in model.layers.parameters()} == {FP8, torch.float32}
        assert model.embed_tokens.matrix.weight.dtype == embedding
        assert model.lm_head.matrix.weight.dtype == INT8


def test_the_vocabulary_of_a_stored_network_is_rounded_only_if_that_is_asked_for(
    tiny_spm, tmp_path
):
    quantize_checkpoint(tiny_spm, tmp_path / "fp8", "one scale an output")
    source = source_of(tmp_path / "fp8")
    config = load_config(source)
    stored = load(source)
    config = replace(config, quantization=quantize_online(config.quantization))
    rounded = load_model(source, config, dtype=torch.float32, device=CPU)
    for (name, kept), weight in zip(
        stored.layers.named_parameters(), rounded.layers.parameters(), strict=True
    ):
        assert torch.equal(kept.float(), weight.float()), name
    assert stored.embed_tokens.matrix.weight.dtype == torch.float32
    assert rounded.embed_tokens.matrix.weight.dtype == FP8
    assert stored.lm_head.matrix.weight.dtype == torch.float32
    assert rounded.lm_head.matrix.weight.dtype == INT8


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_stored_values_are_taken_as_they_are(kind, tiny_spm, tmp_path):
    meant = quantize_checkpoint(tiny_spm, tmp_path / "fp8", kind)
    save_file(meant, tmp_path / "fp8" / "meant")
    model = load(source_of(tmp_path / "fp8"))
    stacked = model.layers[1].mlp.gate_up_proj.matrix
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    values = dequantize_rows(stacked.weight, stacked.scale, torch.float32)
    assert torch.equal(values, torch.cat([meant[name] for name in names]))
    assert model.lm_head.matrix.weight.dtype == torch.float32
    oracle = make_oracle(tiny_spm, find_matrices(model))
    assert torch.equal(compute_logits(model, IDS), compute_logits(oracle, IDS))


def test_blocks_become_rows_within_one_more_rounding(tiny_spm, tmp_path):
    meant = quantize_checkpoint(tiny_spm, tmp_path / "fp8", BY_BLOCK)
    matrices = find_matrices(load(source_of(tmp_path / "fp8")))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        exact = meant[f"model.layers.0.{name}.weight"]
        assert_close_to_quantised(matrices[f"layers.0.{name}.matrix.weight"], exact)


def test_a_matrix_that_is_not_stored_in_fp8_is_quantised(tiny_spm, tmp_path):
    folder = tmp_path / "fp8"
    quantize_checkpoint(tiny_spm, folder, "one scale an output")
    tensors, plain = (load_file(path / "model.safetensors") for path in (folder, tiny_spm))
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = plain[name]
    del tensors[name + "_scale"]
    save_file(tensors, folder / "model.safetensors")
    found = find_matrices(load(source_of(folder)))["layers.0.self_attn.o_proj.matrix.weight"]
    assert torch.equal(found, dequantize_rows(*quantize_rows(plain[name]), torch.float32))


def test_a_stored_head_is_dequantised(tiny_spm, tmp_path):
    folder = tmp_path / "fp8"
    quantize_checkpoint(tiny_spm, folder, "one scale an output")
    tensors = load_file(folder / "model.safetensors")
    values, scale = quantize_rows(tensors["lm_head.weight"])
    tensors |= {"lm_head.weight": values, "lm_head.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors")
    model = load(source_of(folder))
    expected = dequantize_rows(values, scale, torch.float32)
    assert torch.equal(model.lm_head.matrix.weight, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_does(kind, tmp_path):
    build_random_model(tiny_config("qwen3")).save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", kind)
    source = source_of(tmp_path / "fp8")
    whole = compute_logits(load(source), IDS)
    ranks = ThreadRanks(2).run(lambda shard: compute_logits(load(source, shard=shard), IDS))
    # Each rank scales its own part of a row of blocks.
    tolerance = 0.1 if kind == BY_BLOCK else 1e-4
    for logits in ranks:
        assert (logits - whole).norm() <= tolerance * whole.norm()


def test_the_last_of_many_ranks_has_padding_in_its_quantised_embedding(tiny_9heads):
    logits = ThreadRanks(9).run(
        lambda shard: compute_logits(load_online(tiny_9heads, shard=shard), IDS)
    )
    assert all(one.isfinite().all() for one in logits)
    assert all(torch.equal(one, two) for one, two in pairwise(logits))


def test_dummy_weights_are_those_without_quantisation_quantised(tiny_spm):
    plain = dict(load(source_of(tiny_spm, "dummy")).named_parameters())
    model = load_online(tiny_spm, "dummy")
    matrices = find_matrices(model)
    for name, values in model.named_parameters():
        if name in matrices:
            expected = quantize_rows(plain[name], values.dtype)
            assert torch.equal(matrices[name], dequantize_rows(*expected, torch.float32))
        elif not name.endswith(".scale"):
            assert torch.equal(values, plain[name])


QWEN3_8B = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288}
LLAMA3_8B = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}


@pytest.mark.parametrize(("sizes", "num_layers"), [(QWEN3_8B, 36), (LLAMA3_8B, 32)])
def test_weights_of_a_real_shape_take_half(sizes, num_layers, tiny_spm):
    config = replace(
        load_config(source_of(tiny_spm)),
        num_layers=num_layers,
        sliding_windows=(None,) * num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        **sizes,
    )
    plain, quantised = (
        count_bytes(replace(config, quantization=quantization)) for quantization in (None, ONLINE)
    )
    assert 0.5 < quantised / plain < 0.502


def count_bytes(config):
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = get_builder(config)(config, Shard())
        finally:
            torch.set_default_dtype(torch.float32)
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("scheme", "field"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        (QWEN | {"activation_scheme": "none"}, "activation_scheme"),
        (QWEN | {"weight_block_size": [128]}, "weight_block_size"),
        (QWEN | {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]}, "layers.1.mlp.up_proj"),
        (QWEN | {"modules_to_not_convert": ["self_attn"]}, "layers.0.self_attn.q_proj"),
        (compressed("tensor", ignore=[r"re:.*layers\.1\..*o_proj"]), "layers.1.self_attn.o_proj"),
        (compressed("tensor", ignore=["re:("]), "ignore"),
        (compressed("tensor", ignore="lm_head"), "ignore"),
        (compressed("tensor", format="pack-quantized"), "format"),
        (compressed("tensor", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed("tensor", config_groups={}), "config_groups"),
        (compressed("group"), "strategy"),
    ],
)
def test_a_scheme_that_is_not_supported_is_refused_by_name(scheme, field, tiny_spm, tmp_path):
    write_scheme(copy(tiny_spm, tmp_path), scheme)
    with pytest.raises(ConfigError, match=r"config\.json") as refusal:
        load_config(source_of(tmp_path / "fp8"))
    assert field in str(refusal.value)


@pytest.mark.parametrize("change", ["targets", "weights", "input_activations"])
def test_groups_of_other_types_are_refused(change, tiny_spm, tmp_path):
    scheme = compressed("channel")
    group = scheme["config_groups"]["group_0"]
    others = {"targets": ["Conv"], "weights": {"num_bits": 4, "type": "int"}}
    group[change] = others.get(change)  # activations: none, 16 bits
    write_scheme(copy(tiny_spm, tmp_path), scheme)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(source_of(tmp_path / "fp8"))


def copy(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "fp8", "one scale an output")
    return tmp_path / "fp8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), r"is fp8 and has no weight_scale"),
        (lambda tensors, name: tensors.update({name: torch.ones(3)}), r"has shape \(3,\), which"),
    ],
)
def test_a_scale_that_is_missing_or_misshapen_is_named(change, message, tiny_spm, tmp_path):
    folder = copy(tiny_spm, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.o_proj.weight_scale")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"o_proj\.weight.*" + message):
        load(source_of(folder))
