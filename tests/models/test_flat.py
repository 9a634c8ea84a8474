"""The flat form of a network computes what the network does."""

import pytest
import torch

from octavo.models.flat import FlatNetwork, _flatten_norm
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


def test_a_norm_holds_for_rows_of_any_size():
    rows = torch.randn(6, 96) * torch.tensor([0, 1e-10, 1e-3, 1, 1e10, torch.nan])[:, None]
    norm = RMSNorm(96, eps=1e-5)
    norm.weight.normal_()
    found, expected = _flatten_norm(norm)(rows), norm(rows, None)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)


def attend(layer, qkv):
    """Stand for any attention."""
    return qkv[:, : layer.num_heads * layer.head_dim] - qkv[:, -1:]
