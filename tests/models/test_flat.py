"""The flat form of a network computes what the network does."""

from functools import partial

import pytest
import torch

from octavo.attention.backend import AttentionInputs
from octavo.attention.cpu_backend import CpuBackend
from octavo.models import small_ops
from octavo.models.flat import FlatNetwork, FlatNorm, LayerOps
from octavo.models.fused import FusedOps, list_int4_layers
from octavo.models.layers.norm import RMSNorm
from octavo.models.ops.int4_linear import MAX_ROWS, can_quantize
from octavo.models.rounding import round_network
from tests.checkpoints import build_random_model, save_checkpoint, tiny_config
from tests.models.oracle import load, source_of

IDS = torch.tensor([1, 259, 285, 344, 0, 100])
NETWORKS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_computes_the_same(name, dtype, is_packed, tmp_path):
    model_type, changes = NETWORKS[name]
    theirs = build_random_model(tiny_config(model_type, **changes))
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_()
    theirs.save_pretrained(tmp_path)
    model = load(source_of(tmp_path), dtype=dtype)
    if is_packed:
        model.pack()
    flat = FlatNetwork(model)
    found = flat.compute_logits(flat(IDS, attend))
    expected = model.compute_logits(model(IDS, attend))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(found, expected)
    wanted = torch.tensor([5, 2])
    found, expected = flat(IDS, attend, wanted), flat(IDS, attend)[wanted]
    accuracy = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, atol=accuracy, rtol=accuracy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_that_may_be_compiled_compute_the_same(dtype, tiny_spm):
    flat = FlatNetwork(load(source_of(tiny_spm), dtype=dtype))
    expected, eps = flat(IDS, attend), flat.network.config.norm_eps
    calls = []

    def note_add_norm(total, x, norm):
        calls.append(x.dtype)
        return small_ops.add_norm(total, x, norm.weight, eps=eps)

    flat.use(dtype, LayerOps(note_add_norm, small_ops.silu_mul))
    accuracy = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(flat(IDS, attend), expected, atol=accuracy, rtol=accuracy)
    assert calls == [dtype] * (2 * len(flat.attention_layers) - 1)


@pytest.fixture(scope="module")
def fused(tiny_spm):
    """A network in four bits, in plain and in fused form, with what was called of the latter."""
    if not can_quantize():
        pytest.skip("this CPU has no AVX2")
    model = load(source_of(tiny_spm))
    round_network(model, "int4")
    model.pack()
    plain, flat, calls = FlatNetwork(model), FlatNetwork(model), []
    config, layer = model.config, model.layers[0].self_attn.layer
    sizes = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads, "eps": 1e-6}
    for name, max_rows in (("few", 2), ("more", MAX_ROWS)):
        project = partial(small_ops.project_int4, **sizes)
        finish = note(calls, name, partial(small_ops.finish_int4, eps=config.norm_eps))
        flat.fuse(FusedOps(project, finish, with_tiles=False), max_rows=max_rows)
    return plain, flat, calls


@pytest.mark.parametrize(("num_rows", "name"), [(1, "few"), (2, "few"), (3, "more"), (9, None)])
def test_fused_layers_compute_the_same(num_rows, name, fused):
    plain, flat, calls = fused
    calls.clear()
    ids, found = torch.arange(num_rows), []
    for network in (plain, flat):
        backend = CpuBackend(network.network.kv_cache_spec(16), num_rows, dtype=torch.bfloat16)
        found.append(network(ids, backend.bind(make_inputs(num_rows))))
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()
    assert calls == ([] if name is None else [name] * len(flat.attention_layers))
    assert found[1].dtype == torch.float32


@pytest.mark.parametrize("wanted", [[2], [0, 2, 1]], ids=len)
def test_fused_layers_finish_as_many_rows_as_are_wanted(wanted, fused):
    _, flat, calls = fused
    backend = CpuBackend(flat.network.kv_cache_spec(16), 3, dtype=torch.bfloat16)
    ids = torch.arange(3)
    expected = flat(ids, backend.bind(make_inputs(3)))[wanted]
    calls.clear()
    found = flat(ids, backend.bind(make_inputs(3)), torch.tensor(wanted))
    assert (found - expected).norm() < 0.02 * expected.norm()
    *before, last = calls
    assert set(before) == {"more"}
    assert last == ("few" if len(wanted) == 1 else "more")


def test_layers_are_not_fused_around_other_attention_or_padding(fused):
    plain, flat, calls = fused
    calls.clear()
    assert torch.equal(flat(IDS, attend), plain(IDS, attend))
    inputs = make_inputs(2)
    inputs.slot_mapping[0] = -1
    backend = CpuBackend(flat.network.kv_cache_spec(16), 2, dtype=torch.bfloat16)
    flat(IDS[:2], backend.bind(inputs))
    assert calls == []


def test_layers_with_a_bias_or_in_another_type_are_not_fused(tmp_path, tiny_spm):
    changes = {"attention_bias": True}
    save_checkpoint(tmp_path, build_random_model(tiny_config("llama", **changes)))
    with_bias = load(source_of(tmp_path))
    round_network(with_bias, "int4")
    assert list_int4_layers(with_bias) == list_int4_layers(load(source_of(tiny_spm))) == []


def make_inputs(num_rows):
    """Return inputs of rows that have one token each, in a block of their own."""
    rows = torch.arange(num_rows, dtype=torch.int32)
    starts, zeros = torch.arange(num_rows + 1, dtype=torch.int32), torch.zeros_like(rows)
    return AttentionInputs(starts, zeros + 1, rows[:, None], zeros, 16 * rows.long())


def note(calls, name, function):
    return lambda *tensors: (calls.append(name), function(*tensors))[1]


def test_a_norm_holds_for_rows_of_any_size():
    rows = torch.randn(6, 96) * torch.tensor([0, 1e-10, 1e-3, 1, 1e10, torch.nan])[:, None]
    norm = RMSNorm(96, eps=1e-5)
    norm.weight.normal_()
    found, expected = FlatNorm(norm)(rows), norm(rows, None)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)


def attend(layer, qkv, *, last_only=False):
    """Stand for any attention."""
    return qkv[:, : layer.num_heads * layer.head_dim] - qkv[:, -1:]
