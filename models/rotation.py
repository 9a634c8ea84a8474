"""Changes the basis of a network's residual stream, so that no channel of it stands out.

A few channels are a hundred times larger than the others; rounded with one scale, the others would
be lost. An orthogonal matrix after everything that writes to the stream, and its inverse in front
of everything that reads from it, spread them over all channels. Both are folded into the weights,
and RMSNorm does not notice once its weights are, too: in exact arithmetic nothing changes (QuaRot,
arXiv 2404.00456).
"""

from torch import Tensor

from octavo.models.causal_lm import CausalLM
from octavo.models.layers.decoder import DecoderLayer
from octavo.models.layers.embedding import VocabParallelEmbedding
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.norm import RMSNorm
from octavo.models.ops.int8_linear import make_rotation


def rotate_residual_stream(model: CausalLM) -> None:
    """Rotate a float32 network in place; a head that is the embedding becomes one of its own."""
    assert model.shard.size == 1, "a shard of a network is not rotated"
    untie_head(model)
    weight = model.embed_tokens.matrix.weight
    rotation = make_rotation(model.config.hidden_size)
    weight.copy_(weight @ rotation)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        _rotate_inputs(layer.self_attn.qkv_proj, layer.input_layernorm, rotation)
        _rotate_outputs(layer.self_attn.o_proj, rotation)
        _rotate_inputs(layer.mlp.gate_up_proj, layer.post_attention_layernorm, rotation)
        _rotate_outputs(layer.mlp.down_proj, rotation)
    _rotate_inputs(model.lm_head, model.norm, rotation)


def untie_head(model: CausalLM) -> None:
    """Give the head a matrix of its own: a norm is folded into it, but not into the embedding."""
    if model.lm_head is model.embed_tokens:
        weight = model.embed_tokens.matrix.weight
        model.lm_head = VocabParallelEmbedding(*weight.shape, shard=model.shard)
        model.lm_head.matrix.weight.copy_(weight)


def _rotate_inputs(
    linear: ColumnParallelLinear | VocabParallelEmbedding, norm: RMSNorm, rotation: Tensor
) -> None:
    weight = linear.matrix.weight
    weight.copy_((weight * norm.weight) @ rotation)
    norm.weight.fill_(1)


def _rotate_outputs(linear: RowParallelLinear, rotation: Tensor) -> None:
    linear.matrix.weight.copy_(rotation.T @ linear.matrix.weight)
    if linear.bias is not None:
        linear.bias.copy_(linear.bias @ rotation)
