"""Which operations of a network are compiled, with which inputs, and what names they get."""

import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import __version__
from octavo.attention import small_ops as attention_ops
from octavo.attention.cpu_backend import CpuBackend
from octavo.models import small_ops as layer_ops
from octavo.models.flat import FlatNetwork
from octavo.models.ops.int4_linear import Int4Weight

NUM_ROWS = 3
"""Of examples: any number but 1, which stands for itself."""
FORMAT = 2
"""Rises when libraries are made in another way, of the same functions."""
MIN_HIDDEN_SIZE = 256
"""Narrower networks are for tests: compiling takes longer than they ever run."""


@dataclass(frozen=True, slots=True)
class Example:
    """What an operation gets: it may have any size along the dimensions that vary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[int, ...] = (0,)


class Op:
    """A function of tensors that is to be compiled, and the name of its library.

    It computes with up to ``num_threads``; ``with_tiles`` its products read weights as tiles.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Iterable[Example],
        constants: Mapping[str, float],
        *,
        num_threads: int,
        with_tiles: bool = False,
    ) -> None:
        self._job = {
            "module": function.__module__,
            "function": function.__name__,
            "constants": dict(constants),
            "num_threads": num_threads,
            "with_tiles": with_tiles,
            "inputs": [
                (one.shape, str(one.dtype).removeprefix("torch."), one.varying) for one in inputs
            ],
        }
        digest = hashlib.sha256()
        sources = getsource(attention_ops), getsource(layer_ops)
        for part in (FORMAT, __version__, torch.__version__, _describe_cpu(), *sources, self._job):
            digest.update(f"{part}\n".encode())
        self.name = f"{function.__name__}-{digest.hexdigest()[:32]}"

    @property
    def job(self) -> dict[str, Any]:
        """What ``compile_ops`` needs to know."""
        return self._job | {"name": self.name}


def can_compile(network: FlatNetwork) -> bool:
    """Return whether one set of operations serves all layers, and enough work is to be expected."""
    kinds = {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rotary.shape[1], layer.scale)
        for layer in network.attention_layers
    }
    return len(kinds) == 1 and network.network.config.hidden_size >= MIN_HIDDEN_SIZE


class OpList:
    """Lists what may be compiled of a network and its backend."""

    def __init__(self, network: FlatNetwork, backend: CpuBackend) -> None:
        self._model, self._layer = network.network, network.attention_layers[0]
        self._num_threads = torch.get_num_threads()
        layer, config = self._layer, network.network.config
        line = NUM_ROWS, 2 * layer.num_kv_heads * layer.head_dim
        self._lines = Example(line, backend.kv_pool.dtype)
        self._num_all_heads = layer.num_heads + 2 * layer.num_kv_heads
        self._hidden = NUM_ROWS, config.hidden_size
        self._type = network.network.norm.weight.dtype
        self._norm = Example((config.hidden_size,), self._type, ())
        norms = [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        self._place = [
            Example((NUM_ROWS, layer.rotary.shape[1]), torch.float32),
            self._lines,
            Example((NUM_ROWS,), torch.int64),
            *(Example(tuple(norm.shape), norm.dtype, ()) for norm in norms),
        ]
        self._turning = {
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "eps": layer.norm_eps,
        }

    def list_small(self, dtype: torch.dtype) -> list[Op]:
        """Return what ``LayerOps`` and ``AttentionOps`` name, where products give ``dtype``."""
        config, threads = self._model.config, self._num_threads
        add_norm = Example(self._hidden, self._type), Example(self._hidden, dtype), self._norm
        gate_up = Example((NUM_ROWS, 2 * config.intermediate_size), dtype)
        qkv = Example((NUM_ROWS, self._num_all_heads * self._layer.head_dim), dtype)
        return [
            Op(layer_ops.add_norm, add_norm, {"eps": config.norm_eps}, num_threads=threads),
            Op(layer_ops.silu_mul, [gate_up], {}, num_threads=threads),
            Op(
                attention_ops.turn_and_store,
                [qkv, *self._place],
                self._turning,
                num_threads=threads,
            ),
            *self._list_attend(dtype),
        ]

    def list_fused(self, weights: Iterable[Int4Weight], *, with_tiles: bool) -> list[Op]:
        """Return project_int4, finish_int4 and both kinds of attention for such layers.

        Few rows, which have no tiles, do not pay for waking threads between products.
        """
        qkv, output, gate_up, down = (_list_operands(one, with_tiles) for one in weights)
        num_threads = self._num_threads if with_tiles else 1
        hidden, layer = Example(self._hidden, self._type), self._layer
        attended = Example((NUM_ROWS, layer.num_heads * layer.head_dim), self._lines.dtype)
        finished = attended, hidden, *output, self._norm, *gate_up, *down, self._norm
        eps = {"eps": self._model.config.norm_eps}
        fused = (
            (layer_ops.project_int4, (hidden, *qkv, *self._place), self._turning),
            (layer_ops.finish_int4, finished, eps),
        )
        return [
            *(Op(*one, num_threads=num_threads, with_tiles=with_tiles) for one in fused),
            *self._list_attend(torch.bfloat16),
        ]

    def _list_attend(self, dtype: torch.dtype) -> list[Op]:
        """Return attend_tile and, for a single row, attend_row."""
        layer, width, threads = self._layer, 5, self._num_threads
        heads = Example((NUM_ROWS, self._num_all_heads, layer.head_dim), dtype)
        seen = Example((NUM_ROWS * width,), torch.int64)
        bias = Example((NUM_ROWS, 1, 1, width), self._lines.dtype, (0, 3))
        constants = {"num_kv_heads": layer.num_kv_heads, "scale": layer.scale}
        one = Example((1, *heads.shape[1:]), dtype, ())
        return [
            Op(
                attention_ops.attend_tile,
                (heads, self._lines, seen, bias),
                constants,
                num_threads=threads,
            ),
            Op(attention_ops.attend_row, (one, self._lines, seen), constants, num_threads=threads),
        ]


def _list_operands(weight: Int4Weight, with_tiles: bool) -> list[Example]:
    return [
        Example(tuple(operand.shape), operand.dtype, ())
        for operand in weight.get_operands(with_tiles)
    ]


@cache
def _describe_cpu() -> str:
    """Return what decides which instructions a compiler may use here."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    names = "vendor_id", "cpu family", "model", "flags", "Features", "CPU part"
    return "\n".join(line for line in text.splitlines() if line.startswith(names))
