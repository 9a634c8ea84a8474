"""Random operands of products, on a GPU where there is one, and what the products should be."""

import torch
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL_SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (4096, 1024),
    (1024, 3072),
]
"""Features and inputs of the matrices of Qwen3-8B, and some of Qwen3-0.6B."""


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def make_operands(num_rows, num_features, num_inputs, dtype=torch.float32):
    """Return x, weight and bias, whose products have a spread of 1."""
    x = draw(num_rows, num_inputs) * num_inputs**-0.5
    return x.to(dtype), draw(num_features, num_inputs, dtype=dtype), draw(num_features, dtype=dtype)


def product(x, weight, bias=None):
    """Compute it in float64."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
