"""How steps become calls of xformers' operator, and what it refuses; the operator is a fake."""

import sys

import pytest
import torch

from octavo.attention.backend import KVCacheSpec
from octavo.attention.xformers_backend import DecodeRows, XformersBackend, check_support
from octavo.errors import ConfigError
from tests.attention.fake_xformers import FakeMask, FakeXformers
from tests.attention.ops.batches import (
    DEVICE,
    NUM_LAYERS,
    TOLERANCES,
    make_batch,
    make_layer,
    run_reference,
)

SUPPORTED = {"head_dim": 128, "block_size": 64, "dtype": torch.bfloat16, "windows": (None, None)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def xformers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    fake = FakeXformers()
    fake.install(monkeypatch)
    return fake


def run(batch, **options):
    """Run one step over the batch's pool; all that torch.empty returns is NaN."""
    pool = batch.pool
    spec = KVCacheSpec(NUM_LAYERS, pool.shape[4], pool.shape[5], pool.shape[3])
    backend = XformersBackend(spec, len(pool), dtype=pool.dtype, device=DEVICE)
    backend.kv_pool.copy_(pool)
    torch.use_deterministic_algorithms(True)
    try:
        out = backend.bind(batch.inputs)(batch.layer, batch.qkv, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    return out, backend.kv_pool


@pytest.mark.parametrize(
    ("rows", "num_padding"),
    [([(1, 70), (1, 9)], 0), ([(1, 5), (9, 11), (1, 130), (3, 31)], 2), ([(17, 40), (2, 2)], 0)],
)
def test_a_step_equals_the_reference(rows, num_padding):
    batch = make_batch(
        make_layer(kv_heads=3, group=2, head_dim=16, norm=True),
        rows,
        dtype=torch.float16,
        block_size=64,
        num_padding_rows=num_padding,
        num_padding_tokens=num_padding,
    )
    expected, expected_pool = run_reference(batch)
    out, pool = run(batch)
    assert out[~batch.is_live].eq(0).all()
    found = out[batch.is_live].float()
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    assert error < TOLERANCES[torch.float16]
    torch.testing.assert_close(pool.float(), expected_pool, equal_nan=True, atol=2e-3, rtol=2e-3)


def test_no_other_token_attends_where_last_ones_alone_are_read():
    layer = make_layer(kv_heads=3, group=2, head_dim=16)
    batch = make_batch(layer, [(1, 5), (9, 11), (3, 31)], dtype=torch.float16, block_size=64)
    expected, _ = run_reference(batch)
    out, _ = run(batch, last_only=True)
    last = [0, 9, 12]
    assert out.ne(0).any(dim=1).nonzero().flatten().tolist() == last
    accuracy = TOLERANCES[torch.float16]
    torch.testing.assert_close(out[last].float(), expected[last], atol=accuracy, rtol=accuracy)


def test_rows_without_a_token_are_no_rows():
    batch = make_batch(
        make_layer(kv_heads=1, head_dim=16), [(1, 9), (4, 4)], dtype=torch.float16, block_size=64
    )
    inputs = batch.inputs
    inputs.query_start[:] = torch.tensor([0, 1, 5])
    padded = type(inputs)(
        torch.cat((inputs.query_start, torch.tensor([5, 5]).int())),
        torch.cat((inputs.context_lengths, torch.zeros(2).int())),
        inputs.block_tables.repeat(2, 1),
        inputs.positions,
        inputs.slot_mapping,
    )
    expected, _ = run(batch)
    found, _ = run(type(batch)(batch.layer, padded, batch.pool, batch.qkv))
    assert torch.equal(found, expected)


def test_indices_are_in_range_whatever_the_inputs_hold():
    inputs = make_batch(make_layer(), [(1, 9), (4, 4)], block_size=64).inputs
    for values in ([5, -7, 2**31 - 1], [-(2**31), 3, 0], [9, 9, 9]):
        inputs.query_start[:] = torch.tensor(values)
        rows = DecodeRows.create(inputs, FakeMask, block_size=64, pages_per_block=4)
        assert rows.first_tokens.min() >= 0
        assert rows.first_tokens.max() < 5
        assert rows.token_rows.min() >= 0
        assert rows.token_rows.max() < len(rows.first_tokens) == 4


def test_nothing_of_the_pool_is_copied(xformers):
    batch = make_batch(make_layer(), [(1, 70), (1, 3)], dtype=torch.float16, block_size=64)
    _, pool = run(batch)
    call = xformers.calls[-1]
    page_bytes = pool[0, 0, 0].numel() * pool.itemsize
    first = 2 * batch.layer.index
    assert call.key.data_ptr() == pool.data_ptr() + first * page_bytes
    assert call.value.data_ptr() == call.key.data_ptr() + page_bytes
    assert call.key.stride(3) == 0  # query heads share keys
    assert call.key.shape[1] == (len(pool) * 2 * NUM_LAYERS - first - 1) * 64


@pytest.mark.parametrize(
    ("num_rows", "num_padded", "kv_heads", "parts"),
    [(1, 2, 2, 64), (7, 8, 2, 64), (8, 16, 2, 32), (8, 16, 100, 1)],
)
def test_rows_become_a_power_of_two_with_one_to_spare(
    num_rows, num_padded, kv_heads, parts, xformers
):
    layer = make_layer(kv_heads=kv_heads, group=1, head_dim=16)
    run(make_batch(layer, [(1, 2)] * num_rows, dtype=torch.float16, block_size=64))
    call = xformers.calls[-1]
    lengths = call.attn_bias.k_seqinfo.seqlen
    assert lengths.tolist() == [2] * num_rows + [0] * (num_padded - num_rows)
    assert len(call.attn_bias.block_tables) == call.query.shape[1] == num_padded
    assert call.attn_bias.q_seqinfo.seqstart.tolist() == list(range(num_padded + 1))
    assert call.parts == parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "heads have 96 elements, not one of"),
        ({"block_size": 16}, "block_size is 16, not a multiple of 64"),
        ({"dtype": torch.float32}, "K/V are float32, not float16 or bfloat16"),
        ({"dtype": torch.float8_e4m3fn}, "K/V are float8_e4m3fn, not"),
        ({"windows": (None, 128)}, "some layers have a sliding window"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, message):
    check_support(**SUPPORTED)
    with pytest.raises(ConfigError, match=f"attention_backend is xformers.*{message}"):
        check_support(**SUPPORTED | change)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability is \(7, 5\), below \(8, 0\)"):
        check_support(**SUPPORTED)


def test_all_reasons_are_told_at_once():
    with pytest.raises(ConfigError, match=r"elements.*multiple.*window"):
        check_support(**SUPPORTED | {"head_dim": 80, "block_size": 8, "windows": (4,)})


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    for use in (
        lambda: check_support(**SUPPORTED),
        lambda: XformersBackend(KVCacheSpec(1, 1, 64, 64), 1, dtype=torch.float16, device="cpu"),
    ):
        with pytest.raises(ConfigError, match=r'cannot be imported .*install "octavo\[xformers\]"'):
            use()


def test_a_pool_of_more_tokens_than_it_can_count_is_refused():
    spec = KVCacheSpec(32, 1, 16, 64)
    with pytest.raises(ConfigError, match="524288 blocks has 2147483648 of them"):
        XformersBackend(spec, 2**19, dtype=torch.float16, device="meta")
