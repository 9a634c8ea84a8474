"""Steps of any mix of rows over a poisoned pool, run by the kernels and by the reference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec
from octavo.attention.ops.decode import decode
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.plan_decode import plan_decode
from octavo.attention.ops.plan_prefill import plan_prefill
from octavo.attention.ops.prefill import prefill
from octavo.attention.ops.store_kv import store_kv
from octavo.attention.reference import ReferenceBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER_INDEX, NUM_LAYERS = 1, 2


@dataclass(frozen=True)
class Batch:
    """One step; ``pool`` has values where tokens are stored already and NaN everywhere else."""

    layer: AttentionLayer
    inputs: AttentionInputs
    pool: Tensor  # (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
    qkv: Tensor

    @property
    def cache(self) -> PagedKV:
        return PagedKV(self.pool[:, LAYER_INDEX, 0], self.pool[:, LAYER_INDEX, 1])

    @property
    def is_live(self) -> Tensor:
        return self.inputs.slot_mapping >= 0


def make_layer(*, kv_heads=2, group=2, head_dim=64, max_position=512, norm=False, **more):
    rotary_dim = more.pop("rotary_dim", head_dim)
    angles = torch.rand(max_position, rotary_dim // 2, device=DEVICE) * 6
    norms = {}
    if norm:
        norms = {name: torch.rand(head_dim, device=DEVICE) + 0.5 for name in ("q_norm", "k_norm")}
    return AttentionLayer(
        index=LAYER_INDEX,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=torch.cat((angles.cos(), angles.sin()), dim=1),
        **norms,
        **more,
    )


def make_batch(
    layer,
    rows,
    *,
    dtype=torch.float32,
    kv_dtype=None,
    block_size=16,
    num_padding_rows=0,
    num_padding_tokens=0,
):
    """Make a step of ``rows``, each (tokens of this step, context length), in shuffled blocks."""
    counts = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(counts) + 2
    tables = torch.full((len(rows) + num_padding_rows, max(counts) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(num_blocks).int()
    positions, slots, stored = [], [], []
    for row, (num_tokens, context) in enumerate(rows):
        tables[row, : counts[row]], free = free[: counts[row]], free[counts[row] :]
        token = torch.arange(context)
        slot = tables[row, token // block_size].long() * block_size + token % block_size
        stored.append(slot[: context - num_tokens])
        positions.append(token[context - num_tokens :])
        slots.append(slot[context - num_tokens :])
    lengths = [num_tokens for num_tokens, _ in rows] + [1] * num_padding_rows
    padding = torch.zeros(num_padding_rows + num_padding_tokens, dtype=torch.int64)
    inputs = AttentionInputs(
        torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
        torch.tensor([context for _, context in rows] + [0] * num_padding_rows).int().to(DEVICE),
        tables.to(DEVICE),
        torch.cat((*positions, padding)).int().to(DEVICE),
        torch.cat((*slots, padding - 1)).to(DEVICE),
    )
    pool = _make_pool(layer, num_blocks, block_size, torch.cat(stored))
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    qkv = torch.randn(len(inputs.positions), width, device=DEVICE)
    qkv[~(inputs.slot_mapping >= 0)] = torch.nan
    pool = pool.to(kv_dtype or dtype)
    return Batch(_cast_norms(layer, dtype), inputs, pool, qkv.to(dtype))


def share_blocks(batch, rows, num_blocks):
    """Let rows begin with the blocks of the first of them."""
    tables = batch.inputs.block_tables
    tables[rows, :num_blocks] = tables[rows[0], :num_blocks]


def _make_pool(layer, num_blocks, block_size, stored):
    shape = (num_blocks, NUM_LAYERS, 2, block_size, layer.num_kv_heads, layer.head_dim)
    pool = torch.full(shape, torch.nan, device=DEVICE)
    stored = stored.to(DEVICE)
    values = torch.randn(len(stored), 2, *shape[4:], device=DEVICE)
    pool[stored // block_size, LAYER_INDEX, :, stored % block_size] = values
    return pool


def _cast_norms(layer, dtype):
    if layer.q_norm is None:
        return layer
    return replace(layer, q_norm=layer.q_norm.to(dtype), k_norm=layer.k_norm.to(dtype))


def run_kernels(batch, *, num_programs=5, cache=None, prefill=prefill, num_families=None):
    """Store, then attend with both kernels; all that torch.empty returns is NaN."""
    cache = cache or batch.cache
    torch.use_deterministic_algorithms(True)
    try:
        workspace = DecodeWorkspace.create(
            batch.layer.head_dim, batch.pool.dtype, num_programs=num_programs, device=DEVICE
        )
        q, out = store_kv(batch.layer, batch.qkv, inputs=batch.inputs, cache=cache)
        plan = plan_decode(
            batch.layer, batch.inputs, workspace=workspace, block_size=cache.block_size
        )
        decode(batch.layer, q, cache=cache, plan=plan, out=out)
        assert num_families in (None, count_families(plan))
        plan = plan_prefill(batch.layer, batch.inputs, dtype=batch.qkv.dtype)
        prefill(batch.layer, q, cache=cache, plan=plan, out=out)
        _check_last_only(batch, q, out, cache=cache, prefill=prefill)
    finally:
        torch.use_deterministic_algorithms(False)
    assert workspace.rows.arrivals.eq(0).all()
    assert workspace.prefixes.arrivals.eq(0).all()
    return out.flatten(1)


def _check_last_only(batch, q, out, *, cache, prefill):
    """A plan of last tokens gives their outputs and writes no other."""
    found = torch.full_like(out, torch.nan)
    plan = plan_prefill(batch.layer, batch.inputs, dtype=batch.qkv.dtype, last_only=True)
    prefill(batch.layer, q, cache=cache, plan=plan, out=found)
    starts = batch.inputs.query_start
    last = starts[1:][starts.diff() > 1] - 1
    accuracy = {4: 1e-5, 2: 2e-2}[out.itemsize]
    torch.testing.assert_close(found[last], out[last], atol=accuracy, rtol=accuracy)
    assert found.isfinite().flatten(1).any(dim=1).sum() == len(last)


def count_families(plan):
    """Count the families whose prefixes are read together: what begins before their line's end."""
    if not plan.has_prefixes:
        return 0
    end = int(plan.shares[1, :, 8].max())
    return sum(start < end for start in plan.lines[1, :, 0].tolist()) if end else 0


def run_reference(batch):
    """Return the float32 output and the pool that it leaves, rows without a context left out.

    The pool is float32, or of 8 bits like the kernels'. On the CPU: the oracle of a device does not
    run on it.
    """
    pool, inputs = batch.pool, batch.inputs
    live = int((inputs.context_lengths > 0).sum())
    num_tokens = int(inputs.query_start[live])
    spec = KVCacheSpec(NUM_LAYERS, pool.shape[4], pool.shape[5], pool.shape[3])
    dtype = pool.dtype if pool.itemsize == 1 else torch.float32
    backend = ReferenceBackend(spec, len(pool), dtype=dtype)
    backend.kv_pool.copy_(pool)
    cut = AttentionInputs(
        inputs.query_start[: live + 1].cpu(),
        inputs.context_lengths[:live].cpu(),
        inputs.block_tables[:live].cpu(),
        inputs.positions[:num_tokens].cpu(),
        inputs.slot_mapping[:num_tokens].cpu(),
    )
    tensors = {name: _to_cpu(getattr(batch.layer, name)) for name in ("rotary", "q_norm", "k_norm")}
    layer = replace(batch.layer, **tensors)
    out = backend.bind(cut)(layer, batch.qkv[:num_tokens].float().cpu())
    return out.to(DEVICE), backend.kv_pool.to(DEVICE)


def _to_cpu(tensor):
    return None if tensor is None else tensor.cpu()


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_kernels_equal_reference(batch, **run):
    """Compare live rows by relative norm; padding must be exactly zero."""
    expected, _ = run_reference(batch)
    found = run_kernels(batch, **run)
    assert found[~batch.is_live].eq(0).all()
    found = found[batch.is_live].float()
    assert found.isfinite().all()
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    assert error < TOLERANCES[batch.qkv.dtype], f"relative error {error}"
