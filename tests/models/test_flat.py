"""The flat form of a network computes what the network does."""

import pytest
import torch

from octavo.attention.small_ops import MAX_ROWS
from octavo.models import small_ops
from octavo.models.flat import FlatNetwork, FlatNorm, LayerOps
from octavo.models.layers.norm import RMSNorm
from tests.checkpoints import build_random_model, tiny_config
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
    flat(IDS.repeat(MAX_ROWS), attend)
    assert len(calls) == 2 * len(flat.attention_layers) - 1, "many rows are left to torch"


def test_a_norm_holds_for_rows_of_any_size():
    rows = torch.randn(6, 96) * torch.tensor([0, 1e-10, 1e-3, 1, 1e10, torch.nan])[:, None]
    norm = RMSNorm(96, eps=1e-5)
    norm.weight.normal_()
    found, expected = FlatNorm(norm)(rows), norm(rows, None)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)


def attend(layer, qkv):
    """Stand for any attention."""
    return qkv[:, : layer.num_heads * layer.head_dim] - qkv[:, -1:]
