"""Outputs do not depend on how they are computed: one model, many ways, the same tokens.

The oracle is transformers in float32; every other way must give what the plain run gives.
"""

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.config import EngineConfig, Environment
from octavo.engine.messages import unpack_ids
from octavo.entrypoints.launch import create_core, resolve_config, start_compiler
from octavo.executor.step import RowSampling
from octavo.models.source import resolve_source
from tests.checkpoints import build_random_model, save_checkpoint, tiny_config
from tests.engine.requests import make_add

NUM_TOKENS = 24
PROMPTS = [
    [1, *range(20, 37)],
    [1, 30, 31],
    [1, *range(20, 36), 44, 45, 46],
    [1, *range(50, 98)],
    [1, *range(20, 37)],
    [7],
]
GREEDY = RowSampling(seed=0)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    """Folder of a tiny random checkpoint."""
    folder = tmp_path_factory.mktemp(f"equivalence-{request.param}")
    return save_checkpoint(folder, build_random_model(tiny_config(request.param)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the engine computes, in float32."""
    return request.param


@pytest.fixture(scope="module")
def expected(model):
    """What transformers generates greedily, prompt by prompt."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [generate_alone(network, prompt) for prompt in PROMPTS]


def generate_alone(network, prompt):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def make_core(model, device, **settings):
    defaults = {"max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 16}
    config = EngineConfig(
        model=str(model), device=device, dtype="float32", **{**defaults, **settings}
    )
    source = resolve_source(config, Environment.read())
    config = resolve_config(config)
    with start_compiler(config) as compiler:
        return create_core(config, source, compiler)


def run(core, messages):
    """Run messages to their end, checking invariants; returns tokens by number."""
    core.apply(messages)
    tokens = {message.number: [] for message in messages}
    while core.has_work:
        outputs = core.step()
        core.scheduler.check_invariants()
        for number, token_id in zip(
            outputs.numbers if outputs else [],
            unpack_ids(outputs.token_ids).tolist() if outputs else [],
            strict=True,
        ):
            tokens[number].append(token_id)
    return tokens


def generate(model, device, prompts: Sequence[Sequence[int]] = PROMPTS, sampling=None, **settings):
    """Return each prompt's tokens, and the core that made them."""
    core = make_core(model, device, **settings)
    messages = [
        make_add(
            number,
            list(prompt),
            max_tokens=NUM_TOKENS,
            eos_ids=(),
            sampling=sampling[number] if sampling else GREEDY,
            private_namespace=None if core.scheduler.config.enable_prefix_caching else number,
        )
        for number, prompt in enumerate(prompts)
    ]
    tokens = run(core, messages)
    core.shutdown()
    return [tokens[number] for number in range(len(prompts))], core


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_greedy_tokens_equal_transformers(model, device, expected, lag, block_size):
    blocks = 1_024 // block_size
    settings = {"async_scheduling": lag, "block_size": block_size}
    tokens, _ = generate(model, device, num_gpu_blocks_override=blocks, **settings)
    assert tokens == expected


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 3},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "scheduling_policy": "dfs"},
        {"scheduling_policy": "lpm", "max_num_seqs": 2},
    ],
    ids=lambda settings: ", ".join(f"{k}={v}" for k, v in settings.items()),
)
def test_greedy_tokens_do_not_depend_on_scheduling(model, device, expected, settings, lag):
    tokens, _ = generate(model, device, async_scheduling=lag, **settings)
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({"enforce_eager": True}, []),
        ({"cuda_graph_sizes": [8]}, [(8, 8)]),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 60}, [(4, 64)]),
    ],
)
def test_greedy_tokens_do_not_depend_on_graphs(model, expected, settings, captured, monkeypatch):
    monkeypatch.setattr("octavo.executor.graphs.CAPTURE_ROWS", 0)
    core = make_core(model, "cuda", **settings)
    graphs = core._executor._runner.graphs
    messages = [
        make_add(number, prompt, max_tokens=NUM_TOKENS, eos_ids=())
        for number, prompt in enumerate(PROMPTS)
    ]
    assert list(run(core, messages).values()) == expected
    shapes = {(shape.num_rows, shape.num_tokens) for shape in graphs.captured_shapes}
    assert shapes.issuperset(captured)
    assert bool(shapes) == bool(captured)


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_greedy_tokens_survive_retraction(model, device, expected, lag, caching):
    tokens, core = generate(
        model,
        device,
        async_scheduling=lag,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=24,
        block_size=4,
        max_model_len=96,
        schedule_conservativeness=0,
    )
    assert core.scheduler.num_retractions > 0
    assert tokens == expected


def test_a_second_run_reads_the_cache_and_gives_the_same(model, device, expected):
    core = make_core(model, device)
    for repeat in range(2):
        messages = [
            make_add(100 * repeat + n, prompt, max_tokens=NUM_TOKENS, eos_ids=())
            for n, prompt in enumerate(PROMPTS)
        ]
        assert list(run(core, messages).values()) == expected
    assert core.scheduler.block_manager.stats.num_hits >= 16 + 16 + 48


def test_sixteen_together_equal_each_alone(tiny_spm, device):
    prompts = [[1, *range(20, 21 + 3 * n)] for n in range(16)]
    together, _ = generate(tiny_spm, device, prompts)
    assert together == [generate(tiny_spm, device, [prompt])[0][0] for prompt in prompts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {
            "num_gpu_blocks_override": 24,
            "block_size": 4,
            "max_model_len": 96,
            "schedule_conservativeness": 0,
        },
    ],
    ids=["together", "lag", "chunks", "retraction"],
)
def test_seeded_samples_do_not_depend_on_company(tiny_spm, device, settings):
    sampling = [
        RowSampling(seed=n, temperature=1.0, top_p=0.9, frequency_penalty=0.5)
        for n in range(len(PROMPTS))
    ]
    alone = [
        generate(tiny_spm, device, [prompt], [params])[0][0]
        for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]
    together, core = generate(tiny_spm, device, PROMPTS, sampling, **settings)
    assert together == alone
    assert together[0] != together[4], "equal prompts with different seeds"
    assert ("block_size" in settings) == (core.scheduler.num_retractions > 0)
