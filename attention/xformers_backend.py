"""Paged attention with xformers' split-K kernel for rows with one token: a second opinion on ours.

K/V are stored, and prompts attend, as in ``TritonBackend``. Nothing on the host depends on lengths,
so steps are captured like its own. The kernel is compiled anew for each power of two of rows, when
it is first needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.store_kv import store_kv
from octavo.attention.triton_backend import PromptRows
from octavo.errors import ConfigError

HEAD_SIZES = (16, 32, 64, 128, 256, 512)
TILE = 64
"""Tokens that the kernel reads at a time: all of one block."""
MIN_CAPABILITY = (8, 0)
MIN_PROGRAMS = 1024
"""Contexts are cut into parts until there are so many. By xformers' own rule the parts of 64 rows
of 36,000 tokens would take half a gigabyte."""
MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class SplitK:
    """What is used of xformers.

    Operators are called without its dispatcher, which refuses them all where the C++ library does
    not load, as beside CUDA 13: this one does without.
    """

    inputs: Any
    mask: Any
    """Where the keys of queries of many rows stand, by block tables."""
    find_operator: Callable[[int], Any]
    """Returns the operator that cuts contexts into so many parts."""

    @classmethod
    def load(cls) -> "SplitK":
        """Import it.

        Raises:
            ConfigError: it cannot be imported.
        """
        try:
            from xformers.ops import fmha
            from xformers.ops.fmha import attn_bias, triton_splitk
        except ImportError as error:
            raise ConfigError(
                f"attention_backend is xformers, which cannot be imported ({error}): "
                'pip install "octavo[xformers]", or use triton'
            ) from error
        return cls(
            fmha.Inputs,
            attn_bias.PagedBlockDiagonalPaddedKeysMask,
            triton_splitk.FwOp.get_operator,
        )


def check_support(
    *, head_dim: int, block_size: int, dtype: torch.dtype, windows: Sequence[int | None]
) -> None:
    """Check that the kernel can do what a model and the settings ask for.

    Raises:
        ConfigError: it cannot, or it is not installed.
    """
    SplitK.load()
    capability = torch.cuda.get_device_capability()
    reasons = []
    if head_dim not in HEAD_SIZES:
        reasons.append(f"heads have {head_dim} elements, not one of {HEAD_SIZES}")
    if block_size % TILE:
        reasons.append(f"block_size is {block_size}, not a multiple of {TILE}")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"K/V are {str(dtype).removeprefix('torch.')}, not float16 or bfloat16")
    if any(windows):
        reasons.append("some layers have a sliding window")
    if capability < MIN_CAPABILITY:
        reasons.append(f"the GPU's compute capability is {capability}, below {MIN_CAPABILITY}")
    if reasons:
        raise ConfigError(
            f"attention_backend is xformers, which cannot do this: {'; '.join(reasons)}"
        )


class XformersBackend:
    """Owns the KV pool, which is laid out as that of ``TritonBackend``. Nothing of it is copied.

    The kernel knows a distance between tokens, but none between blocks. So it is shown the pool as
    one line of pages, from the layer's first on, and tables that count them, 2 * num_layers a
    block::

        pages    | k 0 | v 0 | k 1 | v 1 | ... | k 0 | v 0 | k 1 | v 1 | ...
        blocks   |             0               |             1           ...
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
    ) -> None:
        num_lines = num_blocks * 2 * spec.num_layers * spec.block_size
        if num_lines >= 2**31:
            raise ConfigError(
                f"attention_backend is xformers, which counts K/V of a token in 31 bits: a pool of"
                f" {num_blocks} blocks has {num_lines} of them: lower gpu_memory_utilization"
            )
        self._split_k = SplitK.load()
        self.kv_pool = torch.empty(spec.pool_shape(num_blocks), dtype=dtype, device=device)

    def bind(self, inputs: AttentionInputs) -> "XformersAttention":
        """Return the attention of one step."""
        pages = self.kv_pool.flatten(0, 2)
        rows = DecodeRows.create(
            inputs,
            self._split_k.mask,
            block_size=pages.shape[1],
            pages_per_block=2 * self.kv_pool.shape[1],
        )
        return XformersAttention(self.kv_pool, self._split_k, inputs, rows)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
        self.kv_pool[target].copy_(self.kv_pool[source])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step as the kernel takes them: one query each.

    Only rows with one token have keys; the result of all others is zero. There are more rows than
    in the step, a power of two, so that few kernels are compiled, and the last has no keys.
    """

    first_tokens: Tensor  # (num_rows,) of the flat batch
    token_rows: Tensor  # (num_tokens,) the row of each token; of padding one without keys
    bias: Any

    @classmethod
    def create(
        cls, inputs: AttentionInputs, mask: Any, *, block_size: int, pages_per_block: int
    ) -> "DecodeRows":
        """Work it out on the device."""
        num_rows, max_num_blocks = inputs.block_tables.shape
        num_tokens = inputs.positions.shape[0]
        padded = 1 << num_rows.bit_length()
        missing = padded - num_rows
        device = inputs.positions.device
        keys = torch.where(inputs.query_start.diff() == 1, inputs.context_lengths, 0)
        # Lengths are on the device alone, so the mask is made for the longest, then told better.
        bias = mask.from_seqlens(
            q_seqlen=[1] * padded,
            kv_seqlen=[max_num_blocks * block_size] * padded,
            block_tables=F.pad(inputs.block_tables * pages_per_block, (0, 0, 0, missing)),
            page_size=block_size,
            device=torch.device("cpu"),
        )
        bias.q_seqinfo.seqstart = torch.arange(padded + 1, dtype=torch.int32, device=device)
        bias.k_seqinfo.seqlen = F.pad(keys, (0, missing))
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
        return cls(
            # Rows without a token may begin behind the last; before a start all inputs are random.
            F.pad(inputs.query_start[:-1].clamp(0, num_tokens - 1), (0, missing)),
            torch.searchsorted(inputs.query_start[1:], tokens, right=True),
            bias,
        )


class XformersAttention:
    """Attention of one step."""

    def __init__(
        self, kv_pool: Tensor, split_k: SplitK, inputs: AttentionInputs, rows: DecodeRows
    ) -> None:
        self._kv_pool = kv_pool
        self._split_k = split_k
        self._inputs = inputs
        self._rows = rows
        self._prompts = PromptRows(inputs)

    def __call__(self, layer: AttentionLayer, qkv: Tensor, *, last_only: bool = False) -> Tensor:
        """Store k and v of all tokens, then attend."""
        cache = PagedKV(self._kv_pool[:, layer.index, 0], self._kv_pool[:, layer.index, 1])
        q, _ = store_kv(layer, qkv, inputs=self._inputs, cache=cache)
        out = self._decode(layer, q)
        self._prompts.attend(layer, q, cache=cache, out=out, last_only=last_only)
        return out.flatten(1)

    def _decode(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """Return the outputs of rows with one token, in their places, and zeros in all others."""
        rows = self._rows
        num_rows = len(rows.first_tokens)
        heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim)
        keys, values = self._view_keys(layer, heads)
        inputs = self._split_k.inputs(
            query=q.index_select(0, rows.first_tokens).view(1, num_rows, *heads),
            key=keys,
            value=values,
            attn_bias=rows.bias,
            scale=layer.scale,
        )
        parts = max(1, min(MAX_PARTS, MIN_PROGRAMS // (num_rows * layer.num_kv_heads)))
        out: Tensor = self._split_k.find_operator(parts).apply(inputs, needs_gradient=False)[0]
        return out.view(num_rows, *q.shape[1:]).index_select(0, rows.token_rows)

    def _view_keys(self, layer: AttentionLayer, heads: tuple[int, int, int]) -> list[Tensor]:
        """Return all pages from the layer's first for k and its first for v on, as many of both."""
        pages = self._kv_pool.flatten(0, 2)
        first = 2 * layer.index
        count = len(pages) - first - 1
        return [
            pages[first + kind :][:count].flatten(0, 1)[None, :, :, None].expand(1, -1, *heads)
            for kind in (0, 1)
        ]
