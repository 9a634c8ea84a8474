"""Rotary position parameters as data; the tables made of them are in ``layers/rotary.py``."""

import math
from dataclasses import dataclass
from typing import Literal

from octavo.models.fields import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles; a field says which kinds use it."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """linear, llama3, yarn: how far the context was stretched."""
    original_max_positions: int = 0
    """llama3, yarn: the context before stretching."""
    low_freq_factor: float = 1.0
    """llama3: with ``high_freq_factor``, the bounds of the blended band."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """yarn: with ``beta_slow``, the rotations that bound the blended band."""
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the band to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: scales cos and sin."""
    divisors: tuple[float, ...] = ()
    """divisors: one per frequency; GGUF files store llama3 scaling so."""

    def stretch(self, max_positions: int) -> int:
        """Return how many positions a network configured for ``max_positions`` can use.

        By convention the configured number leaves yarn's and linear's factor out; llama3's is in.
        """
        if self.kind == "linear":
            return int(max_positions * self.factor)
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        return max_positions


def parse_rope(config: Fields) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Raises:
        ConfigError: the type is unknown or a parameter of it is missing or malformed.
    """
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    fields = config.nested(name)
    for part, value in fields.values.items():
        if isinstance(value, dict):
            raise fields.refuse(part, "rotary parameters that differ by layer are not supported")
    theta = fields.number(
        "rope_theta", default=config.number("rope_theta", default=10_000.0, above=0), above=0
    )
    if fields.number("partial_rotary_factor", default=1.0) != 1:
        raise fields.refuse("partial_rotary_factor", "only 1 is supported")
    kind_field = "rope_type" if "rope_type" in fields.values else "type"
    match fields.text(kind_field, default="default"):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(kind="linear", theta=theta, factor=fields.number("factor", above=0))
        case "llama3":
            return _parse_llama3(fields, theta, original=_original_max_positions(fields, config))
        case "yarn":
            return _parse_yarn(fields, theta, original=_original_max_positions(fields, config))
    raise fields.refuse(kind_field, "supported are default, linear, llama3 and yarn")


def compute_yarn_attention_factor(
    factor: float, *, mscale: float = 0.0, mscale_all_dim: float = 0.0
) -> float:
    """Return the scale of cos and sin that a yarn config implies when it gives none."""
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _parse_llama3(fields: Fields, theta: float, *, original: int) -> RopeConfig:
    low = fields.number("low_freq_factor", above=0)
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=fields.number("factor", above=0),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=fields.number("high_freq_factor", above=low),
    )


def _parse_yarn(fields: Fields, theta: float, *, original: int) -> RopeConfig:
    factor = fields.number("factor", above=0)
    implied = compute_yarn_attention_factor(
        factor,
        mscale=fields.number("mscale", default=0.0),
        mscale_all_dim=fields.number("mscale_all_dim", default=0.0),
    )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=fields.number("beta_fast", default=32.0, above=0),
        beta_slow=fields.number("beta_slow", default=1.0, above=0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=fields.number("attention_factor", default=implied),
    )


def _original_max_positions(fields: Fields, config: Fields) -> int:
    name = "original_max_position_embeddings"
    if name in config.values:  # beside the rope parameters it takes precedence, as in transformers
        return config.count(name)
    return fields.count(name, default=config.count("max_position_embeddings"))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
