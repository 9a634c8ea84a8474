"""The backends of a CPU against dense attention written down token by token."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import cpu_backend
from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec
from octavo.attention.cpu_backend import CpuBackend
from octavo.attention.reference import ReferenceBackend
from octavo.attention.small_ops import attend_row, attend_tile, turn_and_store

MAX_POSITIONS = 700
NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=[CpuBackend, ReferenceBackend])
def backend(request, monkeypatch):
    monkeypatch.setattr(Pool, "Backend", request.param)


def make_rotary(rotary_dim):
    angles = torch.outer(
        torch.arange(MAX_POSITIONS), 10_000 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_layer(*, kv_heads=2, group=2, head_dim=64, index=1, rotary_dim=None, norm=False, **more):
    norms = {"q_norm": torch.rand(head_dim), "k_norm": torch.rand(head_dim)} if norm else {}
    return AttentionLayer(
        index=index,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=make_rotary(rotary_dim or head_dim),
        **norms,
        **more,
    )


class Pool:
    """A poisoned backend and the block tables of rows that grow in it."""

    Backend = CpuBackend

    def __init__(self, layer, *, block_size=16, num_blocks=200, dtype=torch.float32):
        self.layer, self.block_size = layer, block_size
        spec = KVCacheSpec(NUM_LAYERS, layer.num_kv_heads, layer.head_dim, block_size)
        self.backend = self.Backend(spec, num_blocks, dtype=dtype)
        self.backend.kv_pool.fill_(torch.nan)
        self.free = torch.randperm(num_blocks).tolist()
        self.tables = {}
        self.lengths = {}

    def make_inputs(self, counts):
        """Place ``counts[row]`` further tokens of each row."""
        starts, positions, slots = [0], [], []
        for row, count in counts.items():
            table, begin = self.tables.setdefault(row, []), self.lengths.get(row, 0)
            self.lengths[row] = begin + count
            while len(table) * self.block_size < begin + count:
                table.append(self.free.pop())
            starts.append(starts[-1] + count)
            for p in range(begin, begin + count):
                positions.append(p)
                slots.append(table[p // self.block_size] * self.block_size + p % self.block_size)
        tables = torch.zeros(len(counts), max(len(self.tables[row]) for row in counts)).int()
        for i, row in enumerate(counts):
            tables[i, : len(self.tables[row])] = torch.tensor(self.tables[row])
        lengths = torch.tensor([self.lengths[row] for row in counts]).int()
        return AttentionInputs(
            torch.tensor(starts).int(),
            lengths,
            tables,
            torch.tensor(positions).int(),
            torch.tensor(slots),
        )

    def attend(self, qkv):
        """Run one step with ``qkv[row]`` as the further tokens; returns the rows' outputs."""
        counts = {row: len(x) for row, x in qkv.items()}
        attention = self.backend.bind(self.make_inputs(counts))
        outputs = attention(self.layer, torch.cat(list(qkv.values())))  # may be overwritten
        return dict(zip(qkv, outputs.split(list(counts.values())), strict=True))


def make_qkv(layer, num_tokens):
    return torch.randn(num_tokens, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim)


def attend_densely(layer, qkv, kv_dtype=torch.float64):
    """Attend one query after the other, in float64, to k and v rounded to ``kv_dtype``."""
    x = qkv.double().view(len(qkv), -1, layer.head_dim)
    q, k, v = x.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    q, k = rotate_densely(layer, q, layer.q_norm), rotate_densely(layer, k, layer.k_norm)
    k, v = k.float().to(kv_dtype).double(), v.float().to(kv_dtype).double()
    group = layer.num_heads // layer.num_kv_heads
    outputs = []
    for t in range(len(qkv)):
        first = max(0, t + 1 - layer.sliding_window) if layer.sliding_window else 0
        for head in range(layer.num_heads):
            kv_head = head // group
            weights = (k[first : t + 1, kv_head] @ q[t, head] * layer.scale).softmax(0)
            outputs.append(weights @ v[first : t + 1, kv_head])
    return torch.stack(outputs).view(len(qkv), -1).float()


def rotate_densely(layer, x, weight):
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * weight.double()
    half = layer.rotary.shape[1] // 2
    turn = torch.complex(layer.rotary[:, :half].double(), layer.rotary[:, half:].double())
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn[: len(x), None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_step_of_chunks_and_decodes_equals_dense_attention(group, head_dim):
    layer = make_layer(group=group, head_dim=head_dim)
    pool = Pool(layer)
    qkv = {row: make_qkv(layer, length) for row, length in enumerate((1, 33, 40, 17, 20))}
    pool.attend({0: qkv[0], 1: qkv[1][:32], 2: qkv[2][:11], 3: qkv[3][:16]})
    found = pool.attend({1: qkv[1][32:], 2: qkv[2][11:], 3: qkv[3][16:], 4: qkv[4]})
    for row, output in found.items():
        assert_close(output, attend_densely(layer, qkv[row])[-len(output) :])


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_any_chunks_and_windows_equal_dense_attention(block_size, window):
    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 70))
    def check(chunks, other_length):
        layer = make_layer(kv_heads=1, head_dim=8, sliding_window=window)
        pool = Pool(layer, block_size=block_size)
        qkv, other = make_qkv(layer, sum(chunks)), make_qkv(layer, other_length)
        parts = list(qkv.split(chunks))
        found = [pool.attend({0: parts[0], 1: other})[0]]
        found += [pool.attend({0: part})[0] for part in parts[1:]]
        assert_close(torch.cat(found), attend_densely(layer, qkv))

    check()


def test_a_prompt_longer_than_a_tile_equals_dense_attention():
    layer = make_layer(kv_heads=1, head_dim=8, sliding_window=300)
    qkv = make_qkv(layer, 600)
    assert_close(Pool(layer).attend({0: qkv})[0], attend_densely(layer, qkv))


def test_norms_and_partial_rotation_equal_dense_attention():
    layer = make_layer(norm=True, rotary_dim=32)
    qkv = make_qkv(layer, 20)
    assert_close(Pool(layer).attend({0: qkv})[0], attend_densely(layer, qkv))


def test_a_row_reads_blocks_that_the_same_step_writes():
    layer = make_layer()
    pool = Pool(layer)
    qkv = make_qkv(layer, 40)
    reader = torch.cat((qkv[:32], make_qkv(layer, 5)))
    pool.tables, pool.lengths = {0: [7, 8, 9], 1: [7, 8, 11]}, {1: 32}
    found = pool.attend({1: reader[32:], 0: qkv})
    assert_close(found[1], attend_densely(layer, reader)[32:])


def test_a_row_does_not_depend_on_its_company():
    layer = make_layer()
    alone, together = Pool(layer), Pool(layer)
    qkv = {row: make_qkv(layer, 20 + 7 * row) for row in range(6)}
    together.attend({row: x[:-1] for row, x in qkv.items()})
    alone.attend({2: qkv[2][:-1]})
    found = together.attend({row: x[-1:] for row, x in qkv.items()})
    assert_close(found[2], alone.attend({2: qkv[2][-1:]})[2])


def test_negative_slots_are_skipped_and_all_others_keep_their_bits():
    layer = make_layer()
    pool = Pool(layer, num_blocks=2)
    pool.backend.kv_pool.copy_(torch.randn(pool.backend.kv_pool.shape))
    before = pool.backend.kv_pool.clone()
    inputs = AttentionInputs(
        query_start=torch.tensor([0, 1]).int(),
        context_lengths=torch.tensor([6]).int(),
        block_tables=torch.tensor([[0]]).int(),
        positions=torch.tensor([5, 0, 0]).int(),
        slot_mapping=torch.tensor([5, -1, -1]),
    )
    pool.backend.bind(inputs)(layer, make_qkv(layer, 3))
    changed = (pool.backend.kv_pool != before).flatten(4).all(dim=4).nonzero()
    block, index, *place = changed.T.tolist()
    assert (block, index) == ([0, 0], [layer.index, layer.index])
    assert sorted(place) == [[0, 1], [5, 5]]  # K and V of one slot
    assert int((pool.backend.kv_pool != before).sum()) == 2 * layer.num_kv_heads * layer.head_dim


def test_tokens_without_a_row_get_zeros():
    layer = make_layer()
    pool = Pool(layer)
    inputs = pool.make_inputs({0: 2})
    padded = AttentionInputs(
        inputs.query_start,
        inputs.context_lengths,
        inputs.block_tables,
        torch.cat((inputs.positions, torch.zeros(1).int())),
        torch.cat((inputs.slot_mapping, torch.tensor([-1]))),
    )
    output = pool.backend.bind(padded)(layer, make_qkv(layer, 3))
    assert output[2].eq(0).all()
    assert output[:2].isfinite().all()


def test_copying_a_block_copies_all_layers():
    layer = make_layer()
    pool = Pool(layer, num_blocks=3)
    pool.backend.kv_pool.copy_(torch.randn(pool.backend.kv_pool.shape))
    before = pool.backend.kv_pool.clone()
    pool.backend.copy_block(0, 2)
    assert torch.equal(pool.backend.kv_pool, before[[0, 1, 0]])


def test_a_bfloat16_pool_gives_what_float32_does():
    layer = make_layer()
    qkv = make_qkv(layer, 30).bfloat16()
    found = Pool(layer, dtype=torch.bfloat16).attend({0: qkv})[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), attend_densely(layer, qkv.float()), atol=2e-2, rtol=2e-2
    )


def test_a_bfloat16_pool_takes_what_float32_products_give():
    """A prompt alone, then with another row's chunk, then both decoding, far apart in length."""
    layer = make_layer()
    qkv = {0: make_qkv(layer, 300), 1: make_qkv(layer, 20)}
    pool = Pool(layer, dtype=torch.bfloat16)
    steps = [{0: 290}, {0: 9, 1: 19}, {0: 1, 1: 1}]
    found, begin = {0: [], 1: []}, {0: 0, 1: 0}
    for step in steps:
        outputs = pool.attend({row: qkv[row][begin[row] :][:n] for row, n in step.items()})
        for row, output in outputs.items():
            found[row].append(output.float())
            begin[row] += step[row]
    for row, outputs in found.items():
        expected = attend_densely(layer, qkv[row])
        torch.testing.assert_close(torch.cat(outputs), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_that_may_be_compiled_attend_alike(dtype, norm, window):
    """Rows of several lengths decode in one tile, then one far longer beside them, then a chunk."""
    layer = make_layer(norm=norm, rotary_dim=32, sliding_window=window)
    pools = [Pool(layer, dtype=dtype) for _ in range(2)]
    pools[1].free = list(pools[0].free)
    shape = {"num_kv_heads": layer.num_kv_heads}
    turn = partial(turn_and_store, num_heads=layer.num_heads, eps=layer.norm_eps, **shape)
    attend, attend_one = (
        partial(function, scale=layer.scale, **shape) for function in (attend_tile, attend_row)
    )
    calls = []
    prompts = {row: make_qkv(layer, length) for row, length in enumerate((40, 33, 1, 600))}
    steps = [prompts, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1, 3: 1}, {3: 1, 0: 2}]
    for step in steps:
        qkv = {
            row: (x if isinstance(x, torch.Tensor) else make_qkv(layer, x)).to(dtype)
            for row, x in step.items()
        }
        if step is not prompts and isinstance(pools[1].backend, CpuBackend):
            pools[1].backend.ops.turn_and_store[dtype] = note(calls, "turn_and_store", turn)
            pools[1].backend.ops.attend_tile[dtype] = note(calls, "attend_tile", attend)
            pools[1].backend.ops.attend_row[dtype] = note(calls, "attend_row", attend_one)
        expected, found = (
            pool.attend({row: x.clone() for row, x in qkv.items()}) for pool in pools
        )
        for row in step:
            torch.testing.assert_close(found[row], expected[row], atol=1e-2, rtol=1e-2)
    is_used = isinstance(pools[1].backend, CpuBackend)
    assert calls.count("turn_and_store") == 3 * is_used
    assert calls.count("attend_tile") == 2 * is_used
    assert calls.count("attend_row") == (2 if window is None else 1) * is_used, "a chunk has none"


@pytest.mark.parametrize(("length", "is_summed"), [(19, True), (20, False)])
def test_a_single_row_attends_by_sums_as_long_as_they_are_faster(monkeypatch, length, is_summed):
    monkeypatch.setattr(cpu_backend, "MAX_SUMMED_TOKENS", 20)
    layer, calls = make_layer(), []
    pool = Pool(layer)
    pool.attend({0: make_qkv(layer, length)})
    if isinstance(pool.backend, CpuBackend):
        row = partial(attend_row, num_kv_heads=layer.num_kv_heads, scale=layer.scale)
        pool.backend.ops.attend_row[torch.float32] = note(calls, "attend_row", row)
        pool.attend({0: make_qkv(layer, 1)})
        assert len(calls) == is_summed


def note(calls, name, function):
    return lambda *tensors: (calls.append(name), function(*tensors))[1]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setattr(Pool, "Backend", ReferenceBackend)


def test_kv_in_8_bits_is_rounded_once_and_computed_with_in_float32(reference):
    layer = make_layer(norm=True)
    pool = Pool(layer, dtype=torch.float8_e4m3fn)
    qkv = {row: make_qkv(layer, length) for row, length in enumerate((1, 33, 20))}
    pool.attend({1: qkv[1][:32], 2: qkv[2][:3]})
    found = pool.attend({0: qkv[0], 1: qkv[1][32:], 2: qkv[2][3:]})
    for row, output in found.items():
        expected = attend_densely(layer, qkv[row], torch.float8_e4m3fn)
        assert_close(output, expected[-len(output) :])


def test_values_beyond_8_bits_are_cut_to_the_largest(reference):
    layer = make_layer()
    pool = Pool(layer, dtype=torch.float8_e4m3fn)
    qkv = make_qkv(layer, 1)
    qkv[:, -layer.head_dim :] = torch.tensor([1e4, -1e4]).repeat(layer.head_dim // 2)
    (output,) = pool.attend({0: qkv}).values()
    assert output[0, -2:].tolist() == [448.0, -448.0]
