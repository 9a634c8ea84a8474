"""The backend with xformers itself: a kernel that is not ours agrees with the reference."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention.backend import KVCacheSpec
from octavo.attention.xformers_backend import XformersBackend
from tests.attention.ops.batches import (
    NUM_LAYERS,
    TOLERANCES,
    make_batch,
    make_layer,
    run_reference,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of a package not ours
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096]
MIXED = [(1, length) for length in LENGTHS] + [(7, 7), (33, 97), (500, 500), (2, 300)]


@pytest.fixture(autouse=True)
def setup():
    pytest.importorskip("xformers.ops", exc_type=ImportError)
    torch.manual_seed(0)


def make_backend(batch):
    pool = batch.pool
    spec = KVCacheSpec(NUM_LAYERS, pool.shape[4], pool.shape[5], pool.shape[3])
    backend = XformersBackend(spec, len(pool), dtype=pool.dtype)
    backend.kv_pool.copy_(pool)
    return backend


def assert_equals_reference(batch, out):
    expected, _ = run_reference(batch)
    assert out[~batch.is_live].eq(0).all()
    found = out[batch.is_live].float()
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    assert error < TOLERANCES[batch.qkv.dtype], f"relative error {error}"


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 64, 64), (4, 128, 64), (4, 128, 128), (7, 64, 64), (2, 256, 64), (8, 32, 64)],
)
def test_mixed_steps_equal_the_reference(group, head_dim, block_size):
    layer = make_layer(group=group, head_dim=head_dim, max_position=4096, norm=True)
    batch = make_batch(
        layer,
        MIXED,
        dtype=torch.bfloat16,
        block_size=block_size,
        num_padding_rows=3,
        num_padding_tokens=5,
    )
    out = make_backend(batch).bind(batch.inputs)(batch.layer, batch.qkv)
    assert_equals_reference(batch, out)


def test_one_graph_serves_any_mix_of_lengths():
    layer = make_layer(kv_heads=8, group=4, head_dim=128, max_position=9_000)
    mixes = [
        [(1, 8_000)] + [(1, 100)] * 15,
        [(1, 1)] * 16,
        [(1, 1 + 97 * row) for row in range(16)],
    ]
    batches = [make_batch(layer, rows, dtype=torch.bfloat16, block_size=64) for rows in mixes]
    largest = max(batches, key=lambda batch: len(batch.pool))
    widest = max(batches, key=lambda batch: batch.inputs.block_tables.shape[1])
    backend = make_backend(largest)
    static, qkv = widest.inputs, widest.qkv.clone()
    backend.bind(static)(layer, qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.bind(static)(layer, qkv)
    for batch in batches:
        for name in ("context_lengths", "positions", "slot_mapping"):
            getattr(static, name).copy_(getattr(batch.inputs, name))
        static.block_tables[:, : batch.inputs.block_tables.shape[1]] = batch.inputs.block_tables
        qkv.copy_(batch.qkv)
        backend.kv_pool[: len(batch.pool)].copy_(batch.pool)
        graph.replay()
        assert_equals_reference(batch, out)


def test_the_engine_is_as_sure_of_its_tokens_as_with_our_own_kernel(tiny_spm):
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (1, 3, 65, 130, 200)]
    ours, theirs = (
        decode_greedily(tiny_spm, prompts, attention_backend=name)
        for name in ("triton", "xformers")
    )
    for our, their in zip(ours, theirs, strict=True):
        num_equal = 0
        for (our_token, our_logprob), (token, logprob) in zip(our, their, strict=True):
            assert our_logprob == pytest.approx(logprob, abs=0.1)
            if our_token != token:  # of two that are equally likely; from here on texts differ
                break
            num_equal += 1
        assert num_equal > 1


def decode_greedily(folder, prompts, **settings):
    """Return tokens and their log-probabilities of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    with LLM(
        str(folder),
        dtype="bfloat16",
        block_size=64,
        num_gpu_blocks_override=64,
        max_num_seqs=8,  # few kernels to compile
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        [
            (token, entry[token].logprob)
            for token, entry in zip(c.token_ids, c.logprobs, strict=True)
        ]
        for c in completions
    ]
