"""Who computes a linear layer's product."""

import psutil
import pytest
import torch
from torch.nn import functional

from octavo.models.ops import linear as linear_module
from octavo.models.ops import linear_hopper
from octavo.models.ops.gemv import MAX_NORMED, gemv
from octavo.models.ops.hopper_tiles import is_tuned_for
from octavo.models.ops.linear import (
    PackedWeight,
    can_pack,
    find_kernel,
    linear,
    linear_add_norm,
    round_up,
)
from octavo.models.ops.linear_hopper import multiply_on_hopper
from octavo.models.ops.norm import Norm


def make_operands(num_rows, *, device, dtype=torch.float32):
    shapes = [(num_rows, 64), (8, 64), (8,)]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.fixture
def gemv_calls(monkeypatch):
    """Shapes of the weights that linear hands to the kernel."""
    calls = []

    def record(x, weight, bias=None, **folded):
        calls.append(tuple(weight.shape))
        return gemv(x, weight, bias, **folded)

    monkeypatch.setattr(linear_module, "gemv", record)
    return calls


@pytest.mark.gpu
def test_one_row_on_a_gpu_takes_the_kernel(gemv_calls):
    x, weight, bias = make_operands(1, device="cuda")
    torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert gemv_calls == [(8, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(0, torch.float32), (2, torch.float32), (1, torch.float64)]
)
def test_other_numbers_of_rows_and_other_types_are_left_to_torch(gemv_calls, num_rows, dtype):
    x, weight, bias = make_operands(num_rows, device="cuda", dtype=dtype)
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert not gemv_calls


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "kernel"),
    [
        (2, multiply_on_hopper),
        (linear_hopper.MAX_ROWS, multiply_on_hopper),
        (linear_hopper.MAX_ROWS + 1, None),
    ],
)
def test_few_rows_take_a_kernel_where_its_tiles_were_chosen(num_rows, kernel):
    x, weight, _ = make_operands(num_rows, device="cuda", dtype=torch.bfloat16)
    assert find_kernel(x, weight) is (kernel if is_tuned_for(x.device) else None)
    assert find_kernel(x, weight.to(torch.float8_e4m3fn)) is None


@pytest.mark.gpu
def test_rows_that_lack_their_factor_are_never_float16():
    for dtype, is_folded in [(torch.bfloat16, True), (torch.float16, False)]:
        x, weight, _ = make_operands(1, device="cuda", dtype=dtype)
        norm = Norm(torch.ones(8, dtype=dtype, device="cuda"), 1e-6)
        residual = torch.zeros(1, 8, dtype=dtype, device="cuda")
        normed = linear_add_norm(x, weight, None, scale=None, residual=residual, norm=norm)
        assert (normed is not None) == is_folded


@pytest.mark.gpu
def test_a_wide_stream_of_one_row_is_normalised_by_a_launch_of_its_own():
    for size, is_folded in [(MAX_NORMED, True), (MAX_NORMED + 8, False)]:
        shapes = [(1, 64), (size, 64), (1, size), (size,)]
        x, weight, residual, norm = (torch.ones(shape, device="cuda") for shape in shapes)
        folded = linear_add_norm(
            x, weight, None, scale=None, residual=residual, norm=Norm(norm, 1e-6)
        )
        assert (folded is not None) == is_folded


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [linear_hopper.MAX_ROWS + 1, 1000])
def test_many_rows_are_added_to_the_stream_by_their_product(num_rows, dtype):
    x, weight, bias = make_operands(num_rows, device="cuda", dtype=dtype)
    residual, norm = torch.randn(num_rows, 8, device="cuda").to(dtype), Norm(bias, 1e-6)
    expected = functional.linear(x.double(), weight.double()) + residual.double()
    made = linear_add_norm(x, weight, None, scale=None, residual=residual, norm=norm)
    assert made is not None
    normed, total = made
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 2**-7)
    torch.testing.assert_close(total.double(), expected, **tolerance, check_dtype=False)
    expected = functional.rms_norm(total.float(), (8,), bias.float(), 1e-6)
    torch.testing.assert_close(normed.float(), expected, **tolerance)


def test_a_cpu_computes_with_torch(gemv_calls):
    x, weight, bias = make_operands(1, device="cpu")
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    norm = Norm(bias, 1e-6)
    residual = torch.zeros(1, 8)
    assert not linear_add_norm(x, weight, None, scale=None, residual=residual, norm=norm)
    assert not gemv_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 17, 65])
def test_a_packed_weight_gives_the_same_product(num_rows, dtype):
    x, weight, bias = make_operands(num_rows, device="cpu", dtype=dtype)
    if not can_pack(weight):
        pytest.skip(f"this CPU does not pack {dtype}")
    packed = PackedWeight(weight)
    for some in (None, bias):
        torch.testing.assert_close(packed.linear(x, some), functional.linear(x, weight, some))


def test_a_packed_weight_takes_every_other_row_of_a_batch():
    x, weight, bias = make_operands(8, device="cpu")
    y = PackedWeight(weight).linear(x[::2], bias)
    torch.testing.assert_close(y, functional.linear(x[::2], weight, bias))


def test_few_numbers_of_rows_are_computed_and_little_for_nothing():
    counts = range(1, 1_025)
    assert [round_up(count) for count in range(18)] == [*range(17), 18]
    assert all(0 <= round_up(count) - count < count / 8 for count in counts)
    assert len({round_up(count) for count in counts}) == 64


def test_products_of_many_sizes_keep_little_memory():
    weight = torch.randn(128, 128)
    packed, process = PackedWeight(weight), psutil.Process()
    packed.linear(torch.ones(1_024, 128))
    before = process.memory_info().rss
    for num_rows in range(1, 1_025):
        packed.linear(torch.ones(num_rows, 128))
    assert process.memory_info().rss - before < 128 * 2**20


def test_a_packed_weight_is_a_copy():
    x, weight, _ = make_operands(2, device="cpu")
    packed, expected = PackedWeight(weight), functional.linear(x, weight)
    weight.zero_()
    torch.testing.assert_close(packed.linear(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_types_that_onednn_does_not_pack_are_told(dtype):
    _, weight, _ = make_operands(1, device="cpu", dtype=dtype)
    assert not can_pack(weight)
    with pytest.raises(AssertionError, match=f"does not pack {dtype}"):
        PackedWeight(weight)


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.ones(8, 64))
