"""Paged attention in Triton: one store, then one launch for rows with one token and one for others.

Nothing on the host depends on lengths, so that a captured graph serves any mix of them.
"""

import torch
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec
from octavo.attention.ops.decode import decode
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.plan_decode import DecodePlan, plan_decode
from octavo.attention.ops.plan_prefill import PrefillPlan, plan_prefill
from octavo.attention.ops.prefill import prefill
from octavo.attention.ops.prefill_hopper import can_prefill_on_hopper, prefill_on_hopper
from octavo.attention.ops.store_kv import store_kv

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs of the decode kernel side by side: 64 threads of 240 registers each."""


class TritonBackend:
    """Owns the KV pool and the workspace that the programs of a decode launch share.

    The pool has the spec's shape and is not initialised. All steps run on one stream.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
    ) -> None:
        self.kv_pool = torch.empty(spec.pool_shape(num_blocks), dtype=dtype, device=device)
        self._workspace = DecodeWorkspace.create(
            spec.head_dim,
            dtype,
            num_programs=PROGRAMS_PER_MULTIPROCESSOR * _count_multiprocessors(self.kv_pool.device),
            device=device,
        )

    def bind(self, inputs: AttentionInputs) -> "TritonAttention":
        """Return the attention of one step."""
        return TritonAttention(self.kv_pool, self._workspace, inputs)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
        self.kv_pool[target].copy_(self.kv_pool[source])


class TritonAttention:
    """Attention of one step; the first layer that needs a plan makes it for all others."""

    def __init__(
        self, kv_pool: Tensor, workspace: DecodeWorkspace, inputs: AttentionInputs
    ) -> None:
        self._kv_pool = kv_pool
        self._workspace = workspace
        self._inputs = inputs
        self._prompts = PromptRows(inputs)
        self._decode_plans: dict[tuple[int, int, int | None], DecodePlan] = {}

    def __call__(self, layer: AttentionLayer, qkv: Tensor, *, last_only: bool = False) -> Tensor:
        """Store k and v of all tokens, then attend."""
        cache = PagedKV(self._kv_pool[:, layer.index, 0], self._kv_pool[:, layer.index, 1])
        plan = self._plan_decode(layer)  # in front of the store: decode reads it early
        q, out = store_kv(layer, qkv, inputs=self._inputs, cache=cache)
        decode(layer, q, cache=cache, plan=plan, out=out)
        self._prompts.attend(layer, q, cache=cache, out=out, last_only=last_only)
        return out.flatten(1)

    def _plan_decode(self, layer: AttentionLayer) -> DecodePlan:
        key = layer.num_heads, layer.num_kv_heads, layer.sliding_window
        if key not in self._decode_plans:
            self._decode_plans[key] = plan_decode(
                layer,
                self._inputs,
                workspace=self._workspace,
                block_size=self._kv_pool.shape[3],
            )
        return self._decode_plans[key]


class PromptRows:
    """Attention of a step's rows with several tokens; the first layer plans it for all others."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        # With as many tokens as rows each row has one: no prefill launch, which would cost 1 us.
        self._is_empty = inputs.positions.shape[0] <= inputs.context_lengths.shape[0]
        self._plans: dict[tuple[int, bool], PrefillPlan] = {}

    def attend(
        self, layer: AttentionLayer, q: Tensor, *, cache: PagedKV, out: Tensor, last_only: bool
    ) -> None:
        """Write their outputs, or those of their last tokens, into ``out``, and nothing else."""
        if self._is_empty:
            return
        key = layer.num_heads // layer.num_kv_heads, last_only
        if key not in self._plans:
            self._plans[key] = plan_prefill(layer, self._inputs, dtype=q.dtype, last_only=last_only)
        attend = prefill_on_hopper if can_prefill_on_hopper(layer, cache) else prefill
        attend(layer, q, cache=cache, plan=self._plans[key], out=out)


def _count_multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1  # Triton's interpreter runs one program after the other
