"""Every architecture computes the logits that transformers computes, in float32."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer

from octavo.models.ops import linear
from octavo.models.ops.gemv import gemv
from octavo.models.ops.norm import Product
from tests.checkpoints import build_random_model, tiny_config
from tests.models.oracle import compute_logits, dense_attention, load, source_of

IDS = torch.arange(3, 43) * 7 % 345
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
NETWORKS = {
    "llama": ("llama", {}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with heads wider than hidden_size": ("llama", {"head_dim": 32}),
    "llama with linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama with yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with yarn rope": ("qwen3", {"rope_parameters": YARN}),
}


def randomise_vectors(model):
    """Draw biases and norms too: transformers starts them at 0 and 1, which hides mistakes."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(mean=1.0, std=0.3, generator=generator)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_computes_the_logits_of_transformers(name, tmp_path):
    model_type, changes = NETWORKS[name]
    theirs = build_random_model(tiny_config(model_type, **changes))
    randomise_vectors(theirs)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
    torch.testing.assert_close(
        compute_logits(load(source_of(tmp_path)), IDS), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("wanted", [[39], [5, 39, 0, 0], list(range(40))], ids=len)
@pytest.mark.parametrize("name", ["tiny_spm", "tiny_tied"])
def test_states_of_wanted_tokens_are_those_among_all(name, wanted, request):
    model = load(source_of(request.getfixturevalue(name)))
    found = model(IDS, dense_attention, torch.tensor(wanted))
    torch.testing.assert_close(found, model(IDS, dense_attention)[wanted], atol=1e-5, rtol=1e-5)


def test_the_last_layer_computes_only_wanted_tokens_in_and_behind_its_attention(tiny_spm):
    model = load(source_of(tiny_spm))
    rows, last_only = [], []
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))

    def attend(layer, qkv, **options):
        last_only.append(options["last_only"])
        return dense_attention(layer, qkv)

    model(IDS, attend, torch.tensor([39]))
    assert last_only == [False] * (len(model.layers) - 1) + [True]
    assert rows == [40] * (len(model.layers) - 1) + [1]


@pytest.mark.parametrize("name", ["tiny_spm", "tiny_tied"])
def test_a_packed_network_computes_the_same_logits(name, request):
    model = load(source_of(request.getfixturevalue(name)))
    expected = compute_logits(model, IDS)
    model.pack()
    torch.testing.assert_close(compute_logits(model, IDS), expected, atol=1e-5, rtol=1e-5)


def multiply_rows(x, weight, bias, *, scale, is_gated=False, residual=None, norm=None):
    """Fold into a product of torch what a kernel of several rows folds into its own."""
    assert scale is None
    if not isinstance(x, torch.Tensor):
        mean_square = x.square_sums.sum(dim=0) / x.values.shape[1]
        x = x.values * (mean_square + x.norm.eps).rsqrt()[:, None]
    out = functional.linear(x, weight, bias)
    if is_gated:
        gate, up = out.chunk(2, dim=-1)
        out = functional.silu(gate) * up
    if norm is None:
        return Product(out)
    out = out + residual
    return Product(out, out * norm.weight, out.square().sum(dim=1)[None])


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 9])
@pytest.mark.parametrize("name", ["qwen3", "llama with biases"])
def test_a_network_with_few_rows_folds_its_norms_into_products(
    name, num_tokens, tmp_path, monkeypatch
):
    model_type, changes = NETWORKS[name]
    network = build_random_model(tiny_config(model_type, **changes))
    randomise_vectors(network)
    network.save_pretrained(tmp_path)
    model = load(source_of(tmp_path))
    expected = compute_logits(model, IDS[:num_tokens])
    kernels = []

    def find_kernel(x, weight):
        kernels.append(gemv if num_tokens == 1 else multiply_rows)
        return kernels[-1]

    monkeypatch.setattr(linear, "find_kernel", find_kernel)
    folded = compute_logits(model, IDS[:num_tokens])
    torch.testing.assert_close(folded, expected, atol=1e-4, rtol=1e-4)
    assert len(kernels) == 4 * model.config.num_layers + 1


def test_each_kind_of_product_is_computed_once_for_each_number_of_rows(tiny_tied, monkeypatch):
    model = load(source_of(tiny_tied))
    products = []

    def record(x, weight, bias=None, *, scale=None):
        products.append((len(x), tuple(weight.shape)))
        return linear.linear(x, weight, bias, scale=scale)

    monkeypatch.setattr("octavo.models.layers.matrix.linear", record)
    model.multiply_once([8, 40], max_logit_rows=8)
    block, head = model.layers[0], model.lm_head.matrix
    linears = (block.self_attn.qkv_proj, block.self_attn.o_proj, *block.mlp.children())
    shapes = [tuple(linear.matrix.weight.shape) for linear in linears]
    expected = [(num_rows, shape) for num_rows in (8, 40) for shape in shapes]
    assert sorted(products) == sorted([*expected, (8, tuple(head.weight.shape))])


def test_packing_leaves_only_what_is_looked_up_or_small(tiny_tied):
    model = load(source_of(tiny_tied))
    model.pack()
    left = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert left == {"embed_tokens.matrix.weight"}


def test_window_changes_the_logits_only_beyond_it(tmp_path):
    config = tiny_config("mistral", sliding_window=8)
    build_random_model(config).save_pretrained(tmp_path)
    model = load(source_of(tmp_path))
    whole = compute_logits(model, IDS)
    changed = IDS.clone()
    changed[0] = 9
    difference = (compute_logits(model, changed) - whole).abs().amax(dim=-1)
    assert difference[14] > 1e-3  # two layers of window 8 reach 14 tokens back
    assert difference[15:].max() == 0


def test_kv_cache_spec_counts_layers_and_kv_heads(tiny_9heads):
    spec = load(source_of(tiny_9heads)).kv_cache_spec(block_size=16)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (2, 3, 16, 16)


def test_tied_embeddings_give_the_known_greedy_output(tiny_tied):
    model = load(source_of(tiny_tied))
    ids = AutoTokenizer.from_pretrained(tiny_tied)("z").input_ids
    for _ in range(5):
        ids.append(int(compute_logits(model, torch.tensor(ids))[-1].argmax()))
    assert ids[-5:] == [295, 156, 5, 113, 86]


def test_padded_vocabulary_has_logits_for_every_row(tiny_padded_vocab):
    logits = compute_logits(load(source_of(tiny_padded_vocab)), IDS)
    assert logits.shape == (len(IDS), 382)


def test_default_model_knows_the_capital_of_france(smollm2):
    model = load(source_of(smollm2, "gguf"))
    # "The capital of France is", and " Paris"
    prompt = torch.tensor([504, 3575, 282, 4649, 314])
    assert int(compute_logits(model, prompt)[-1].argmax()) == 7042
