"""What the tests of the networks compare with: a dense attention, and checkpoints in a folder."""

from pathlib import Path

import torch
from torch.nn import functional

from octavo.models.config_files import load_config
from octavo.models.loader import load_model
from octavo.models.source import ModelSource

CPU = torch.device("cpu")


def dense_attention(layer, qkv, *, last_only=False):
    """Attend over one sequence that starts at position 0, without any cache."""
    num_tokens = qkv.shape[0]
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    heads = qkv.view(num_tokens, sum(sizes), layer.head_dim).transpose(0, 1)
    q, k, v = heads.split(sizes)  # (heads, num_tokens, head_dim)
    if layer.q_norm is not None:
        q = functional.rms_norm(q, (layer.head_dim,), layer.q_norm, layer.norm_eps)
        k = functional.rms_norm(k, (layer.head_dim,), layer.k_norm, layer.norm_eps)
    q, k = rotate(q, layer.rotary), rotate(k, layer.rotary)
    position = torch.arange(num_tokens)
    age = position[:, None] - position
    is_seen = (age >= 0) & (age < (layer.sliding_window or num_tokens))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=is_seen, scale=layer.scale, enable_gqa=True
    )
    return out.transpose(0, 1).reshape(num_tokens, -1)


def attend_in_float32(layer, qkv, *, last_only=False):
    return dense_attention(layer, qkv.float()).to(qkv.dtype)


def rotate(x, table):
    """Rotate element i of a head with element i + head_dim / 2."""
    cos, sin = table[: x.shape[1]].chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def source_of(path: Path, load_format="safetensors", *, seed=0) -> ModelSource:
    return ModelSource(name=path.name, path=path, load_format=load_format, seed=seed)


def load(source: ModelSource, *, dtype=torch.float32, shard=None):
    return load_model(source, load_config(source), dtype=dtype, device=CPU, shard=shard)


def compute_logits(model, ids):
    return model.compute_logits(model(ids, dense_attention))
