"""The compiled kernels against the reference: every shape, one graph for any mix of lengths."""

import pytest
import torch

from octavo.attention.backend import AttentionInputs, KVCacheSpec
from octavo.attention.ops.prefill import prefill
from octavo.attention.ops.prefill_hopper import can_prefill_on_hopper, prefill_on_hopper
from octavo.attention.triton_backend import TritonBackend
from tests.attention.ops.batches import (
    LAYER_INDEX,
    NUM_LAYERS,
    TOLERANCES,
    assert_kernels_equal_reference,
    make_batch,
    make_layer,
    run_kernels,
    run_reference,
    share_blocks,
)

pytestmark = pytest.mark.gpu
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096]
MIXED = [(1, length) for length in LENGTHS] + [(7, 7), (33, 97), (500, 500), (129, 1024), (2, 300)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_both_prefills_equal_reference(batch):
    assert_kernels_equal_reference(batch, num_programs=396, prefill=prefill)
    if can_prefill_on_hopper(batch.layer, batch.cache):
        assert_kernels_equal_reference(batch, num_programs=396, prefill=prefill_on_hopper)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_steps_equal_the_reference_for_every_head_shape(group, head_dim, dtype):
    layer = make_layer(group=group, head_dim=head_dim, max_position=4096, norm=True)
    batch = make_batch(layer, MIXED, dtype=dtype, num_padding_rows=3, num_padding_tokens=5)
    assert_both_prefills_equal_reference(batch)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_kv_in_8_bits_is_read_as_the_reference_reads_it(group, head_dim):
    layer = make_layer(group=group, head_dim=head_dim, max_position=4096, norm=True)
    batch = make_batch(layer, MIXED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert_kernels_equal_reference(batch, num_programs=396)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", [0, 17_000, 31_990])
def test_one_token_is_found_in_a_long_context(place, kv_dtype):
    layer = make_layer(kv_heads=1, group=4, head_dim=128, max_position=40_000)
    batch = make_batch(layer, [(1, 32_000)], dtype=torch.bfloat16, kv_dtype=kv_dtype)
    found = find_value(batch, place)
    slot = batch.inputs.block_tables[0, place // 16], place % 16
    value = batch.pool[slot[0], LAYER_INDEX, 1, slot[1], 0].float()
    for head in found.view(-1, 128).float():
        assert torch.nn.functional.cosine_similarity(head, value, dim=0) > 0.99


def find_value(batch, place):
    """Attend with queries that all look like the key at ``place``, which is three times as long."""
    layer = batch.layer
    slot = batch.inputs.block_tables[0, place // 16], place % 16
    key = 3 * batch.pool[slot[0], LAYER_INDEX, 0, slot[1], 0].float()
    batch.pool[slot[0], LAYER_INDEX, 0, slot[1], 0] = key.to(batch.pool.dtype)
    cos, sin = layer.rotary[31_999].chunk(2)
    left, right = key.chunk(2)  # turned back: the kernel turns queries to their position
    query = torch.cat((left * cos + right * sin, right * cos - left * sin))
    batch.qkv[0, : 4 * 128] = query.repeat(4)
    return run_kernels(batch, num_programs=396)


@pytest.mark.parametrize("window", [1, 100, 128, 1000])
def test_sliding_windows_equal_the_reference(window):
    layer = make_layer(group=4, head_dim=128, max_position=4096, sliding_window=window)
    batch = make_batch(layer, MIXED, dtype=torch.bfloat16)
    assert_both_prefills_equal_reference(batch)


@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 256])
def test_block_sizes_equal_the_reference(block_size):
    layer = make_layer(group=4, head_dim=128, max_position=4096)
    batch = make_batch(layer, MIXED, dtype=torch.bfloat16, block_size=block_size)
    assert_both_prefills_equal_reference(batch)


def test_float32_equals_the_reference():
    rows = [(1, 1), (1, 130), (1, 700), (40, 77), (64, 64)]
    layer = make_layer(group=4, head_dim=128, max_position=4096)
    assert_kernels_equal_reference(make_batch(layer, rows), num_programs=396)


def test_a_merge_gives_the_same_bits_every_time():
    layer = make_layer(kv_heads=8, group=4, head_dim=128, max_position=40_000)
    rows = [(1, 32_000)] + [(1, 100)] * 31 + [(1, 3_000 + row) for row in range(32)]
    batch = make_batch(layer, rows, dtype=torch.bfloat16)
    share_blocks(batch, list(range(32, 64)), 150)
    backend = make_backend(batch)
    attention = backend.bind(batch.inputs)
    first = attention(batch.layer, batch.qkv)
    for _ in range(200):
        assert torch.equal(attention(batch.layer, batch.qkv), first)


def make_backend(batch):
    pool = batch.pool
    spec = KVCacheSpec(NUM_LAYERS, pool.shape[4], pool.shape[5], pool.shape[3])
    backend = TritonBackend(spec, len(pool), dtype=pool.dtype)
    backend.kv_pool.copy_(pool)
    return backend


def test_one_graph_serves_any_mix_of_lengths():
    layer = make_layer(kv_heads=8, group=4, head_dim=128, max_position=40_000)
    mixes = [
        [(1, 32_000)] + [(1, 100)] * 63,
        [(1, 2_000)] * 64,
        [(1, 1)] * 64,
        [(1, 1 + 37 * row) for row in range(64)],
    ]
    batches = [make_batch(layer, rows, dtype=torch.bfloat16) for rows in mixes]
    share_blocks(batches[1], list(range(0, 64, 2)), 120)
    share_blocks(batches[3], list(range(20, 64)), 40)
    backend = make_backend(max(batches, key=lambda batch: len(batch.pool)))
    static = make_static_inputs(batches[0], num_rows=72)
    qkv = torch.full((72, batches[0].qkv.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    backend.bind(static)(layer, qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.bind(static)(layer, qkv)
    for batch in batches:
        fill(static, batch.inputs)
        qkv[:64].copy_(batch.qkv)
        backend.kv_pool[: len(batch.pool)].copy_(batch.pool)
        out.fill_(torch.nan)
        graph.replay()
        expected, _ = run_reference(batch)
        error = ((out[:64] - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        assert error < TOLERANCES[torch.bfloat16]
        assert out[64:].eq(0).all()


def make_static_inputs(batch, *, num_rows):
    """Padding rows only, with room for any batch."""
    empty = AttentionInputs(
        torch.arange(num_rows + 1),
        torch.zeros(num_rows),
        torch.zeros(num_rows, batch.inputs.block_tables.shape[1]),
        torch.zeros(num_rows),
        torch.full((num_rows,), -1),
    )
    return AttentionInputs(
        empty.query_start.int().cuda(),
        empty.context_lengths.int().cuda(),
        empty.block_tables.int().cuda(),
        empty.positions.int().cuda(),
        empty.slot_mapping.long().cuda(),
    )


def fill(static, inputs):
    rows, width = inputs.block_tables.shape
    static.context_lengths[:rows] = inputs.context_lengths
    static.block_tables[:rows, :width] = inputs.block_tables
    static.positions[:rows] = inputs.positions
    static.slot_mapping[:rows] = inputs.slot_mapping
