"""How much of a card's memory the KV pool gets: measured, not guessed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.errors import ConfigError
from octavo.executor.step_program import StepShape

GIB = 2**30
GRAPH_BYTES = 24 * 2**20
"""Of one captured shape: nodes and parameters of about 400 kernels, twice."""
TOKEN_BYTES = 2**19
"""Activations of one token besides its logits, with room to spare."""
MARGIN_BYTES = 256 * 2**20
"""Left alone: fragments of the allocator, and kernels that are loaded on their first launch."""


def find_graph_bytes(shapes: Sequence[StepShape], vocab_size: int) -> int:
    """Return what graphs of these shapes take.

    Each keeps its nodes and its 16-bit logits, which its step is read from; other activations are
    shared: those of the most tokens are enough.
    """
    if not shapes:
        return 0
    logits = 2 * vocab_size * sum(shape.num_rows for shape in shapes)
    most_tokens = max(shape.num_tokens for shape in shapes)
    return GRAPH_BYTES * len(shapes) + logits + TOKEN_BYTES * most_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on the card, by what takes them."""

    total: int
    others: int
    """Other processes' and the driver's, when this engine started."""
    weights: int
    activations: int
    """The largest step, and what the runner keeps from step to step."""
    graphs: int

    @classmethod
    def measure(
        cls, device: torch.device, *, free_at_start: int, weights: int, graphs: int
    ) -> "MemoryUse":
        """Read the allocator's peak since it was reset, just before the largest step ran."""
        total = torch.cuda.get_device_properties(device).total_memory
        peak = torch.cuda.max_memory_reserved(device)
        return cls(
            total=total,
            others=total - free_at_start,
            weights=weights,
            activations=peak - weights,
            graphs=graphs,
        )

    def find_pool_bytes(self, utilization: float) -> int:
        """Return what is left for K/V when this engine uses ``utilization`` of the card.

        Raises:
            ConfigError: nothing is left; the message says what takes how much.
        """
        allowed = min(int(self.total * utilization), self.total - self.others)
        left = allowed - self.weights - self.activations - self.graphs - MARGIN_BYTES
        if left <= 0:
            raise ConfigError(self._explain(utilization, allowed))
        return left

    def _explain(self, utilization: float, allowed: int) -> str:
        parts = {
            "weights": (self.weights, "take a smaller model"),
            "activations": (self.activations, "lower max_num_batched_tokens or max_num_seqs"),
            "CUDA graphs": (self.graphs, "set enforce_eager or fewer cuda_graph_sizes"),
            "other processes": (self.others, "end other processes on the card"),
        }
        shares = ", ".join(f"{name} {_gib(size)}" for name, (size, _) in parts.items())
        largest = max(parts, key=lambda name: parts[name][0])
        return (
            f"no memory is left for K/V: of {_gib(self.total)}, gpu_memory_utilization "
            f"{utilization} allows {_gib(allowed)}, and needed are {shares}: raise "
            f"gpu_memory_utilization or {parts[largest][1]}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
