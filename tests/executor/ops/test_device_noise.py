"""The kernels' noise is the CPU sampler's."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from octavo.executor import noise as host
from octavo.executor.ops.noise import (
    LIFT_MARGIN,
    LOWEST_NOISE,
    REACH,
    draw_words,
    gumbel,
    interleave,
    lift,
    select_word,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = [0, 1, 2**63 + 12345, 2**64 - 1]
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 - 2**26, 2**32 - 2**26 - 1]


@triton.jit
def _words_kernel(out_ptr, picked_ptr, seed_ptr, position, NUM_GROUPS: tl.constexpr):
    groups = 5 + tl.arange(0, NUM_GROUPS)
    seed = (tl.load(seed_ptr).to(tl.uint32), tl.load(seed_ptr + 1).to(tl.uint32))
    w0, w1, w2, w3 = draw_words(seed, position, groups)
    places = groups[:, None] * 4 + tl.arange(0, 4)[None, :] - 20
    tl.store(out_ptr + places, interleave(w0, w1, w2, w3).to(tl.int64))
    tl.store(picked_ptr + groups - 5, select_word(w0, w1, w2, w3, groups % 4).to(tl.int64))


@triton.jit
def _noise_kernel(words_ptr, noise_ptr, missed_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    words = tl.load(words_ptr + lane).to(tl.uint32)
    noise = gumbel(words)
    tl.store(noise_ptr + lane, noise)
    tl.store(
        missed_ptr + lane,
        (lift(words, tl.exp2(noise * -1.4426950408889634 + LIFT_MARGIN)) < REACH).to(tl.int32),
    )


@triton.jit
def _count_kernel(words_ptr, out_ptr, distance, SIZE: tl.constexpr):
    words = tl.load(words_ptr + tl.arange(0, SIZE)).to(tl.uint32)
    distances = tl.zeros([SIZE], tl.float32) + distance
    tl.store(
        out_ptr, tl.sum((lift(words, tl.exp2(distances * 1.4426950408889634)) < REACH).to(tl.int32))
    )


def make_words(size):
    drawn = np.random.default_rng(0).integers(0, 2**32, size - len(EXTREMES))
    return torch.tensor([*EXTREMES, *drawn], device=DEVICE)


def run_noise_kernel(words):
    noise = torch.full(words.shape, torch.nan, device=DEVICE)
    missed = torch.full(words.shape, -1, dtype=torch.int32, device=DEVICE)
    _noise_kernel[(1,)](words, noise, missed, SIZE=len(words))
    return noise.cpu(), missed.cpu()


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_those_of_the_cpus_sampler(seed):
    out = torch.full((16, 4), -1, device=DEVICE)
    picked = torch.full((16,), -1, device=DEVICE)
    halves = torch.tensor([seed & 0xFFFFFFFF, seed >> 32], device=DEVICE)
    _words_kernel[(1,)](out, picked, halves, 1234, NUM_GROUPS=16)
    groups = np.arange(5, 21, dtype=np.uint32)
    words = host.philox(groups, np.array([1234], np.int32), np.array([seed], np.uint64))
    expected = np.stack(words, axis=-1).astype(np.int64)
    assert (out.cpu().numpy() == expected).all()
    assert (picked.cpu().numpy() == expected[np.arange(16), groups % 4]).all()


def test_noise_is_exact_to_float32_from_end_to_end():
    words = make_words(4096)
    u = (words.cpu().double() + 0.5) * 2.0**-32
    noise, _ = run_noise_kernel(words)
    torch.testing.assert_close(noise.double(), -(-u.log()).log(), rtol=3e-6, atol=1e-6)
    assert noise.min() > LOWEST_NOISE.value


def test_no_word_is_passed_over_that_could_win():
    _, missed = run_noise_kernel(make_words(4096))
    assert not missed.any()


def test_most_words_are_passed_over_when_the_best_is_far():
    words = make_words(4096)
    out = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    _count_kernel[(1,)](words, out, -6.0, SIZE=4096)
    assert 4096 * 0.99 < out.item() < 4096
