"""Tables of rotation angles, made once per network and shared by its layers."""

import math

import torch
from torch import Tensor

from octavo.models.rope import RopeConfig


def build_rotary_table(rope: RopeConfig, *, head_dim: int, max_positions: int) -> Tensor:
    """Return cos | sin of every position's angles: float32, (max_positions, head_dim).

    Computed in float32 step by step as transformers does: networks are trained with its rounding.
    """
    frequencies = compute_frequencies(rope, head_dim)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # (max_positions, head_dim / 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def compute_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each rotated pair: float32, (head_dim / 2,)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _blend_llama3(frequencies, rope)
        case "yarn":
            return _blend_yarn(frequencies, rope)
        case "divisors":
            return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)


def _blend_llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _blend_yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Like llama3's, with a band in dimensions instead of rotations."""
    head_dim = 2 * len(frequencies)
    low = _yarn_dimension(rope.beta_fast, rope, head_dim)
    high = _yarn_dimension(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def _yarn_dimension(num_rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the dimension that turns ``num_rotations`` times within the original context."""
    wavelength = rope.original_max_positions / (num_rotations * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
