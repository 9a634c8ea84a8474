"""What a step asks of the device and of the driver: launches, copies, waits, memory."""

import json

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton import knobs

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.entrypoints.launch import resolve_config
from octavo.executor.compile_ahead import StartCompiler
from octavo.executor.in_process import InProcessExecutor
from octavo.executor.worker import create_runner
from tests.checkpoints import tiny_config
from tests.executor.by_hand import ByHand
from tests.models.oracle import source_of

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(5)
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
NUM_CYCLES = 200_000_000
"""A tenth of a second: longer than any launch."""


def make_executor(folder, *, lag=1, load_format="safetensors", **settings):
    defaults = {"num_gpu_blocks_override": 512, "max_num_seqs": 64, "dtype": "float32"}
    config = resolve_config(EngineConfig(device="cuda", **{**defaults, **settings}))
    with StartCompiler() as compiler:
        runner = create_runner(config, source_of(folder, load_format), compiler)
    return InProcessExecutor(runner, lag=lag)


def admit_all(hand, count, *, length=20, **sampling):
    for row in range(count):
        hand.admit(row, RNG.integers(3, 345, size=length), **sampling)
    hand.step(dict.fromkeys(hand.requests, length))


def decode(hand, num_steps):
    for _ in range(num_steps):
        hand.step(dict.fromkeys(hand.requests, 1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decode_step_is_an_upload_two_graphs_and_a_readback(tiny_spm, temperature):
    hand = ByHand(make_executor(tiny_spm, max_model_len=128), lag=1)
    admit_all(hand, 64, temperature=temperature, top_k=20)
    decode(hand, 3)
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=BOTH, acc_events=True) as profiler:
        decode(hand, 10)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    calls = [event.name for event in profiler.events() if event.name.startswith("cu")]
    launches = [name for name in calls if "Launch" in name]
    assert launches == ["cudaGraphLaunch"] * 20
    assert sum(name.startswith("cudaMemcpy") for name in calls) == 20
    copies = [event.name for event in profiler.events() if event.name.startswith("Memcpy")]
    assert sum("HtoD" in name for name in copies) == sum("DtoH" in name for name in copies) == 10


def test_launching_never_waits_for_the_device(tiny_spm):
    executor = make_executor(tiny_spm, max_model_len=128)
    runner = executor._runner
    hand = ByHand(executor, lag=1)
    admit_all(hand, 8)
    decode(hand, 3)
    hand.finish()
    with torch.cuda.stream(runner._stream):
        torch.cuda._sleep(NUM_CYCLES)
        end_of_sleep = torch.cuda.Event()
        end_of_sleep.record()
    decode(hand, 1)  # nothing is read: the lag is 1
    hand.lag = 2
    executor._lag = 2
    decode(hand, 1)
    assert not end_of_sleep.query(), "two steps were launched behind one that still runs"
    hand.finish()
    assert all(len(request.outputs) == 6 for request in hand.requests.values())


def test_a_thread_that_steps_keeps_its_stream_and_its_mode(tiny_spm):
    hand = ByHand(make_executor(tiny_spm, max_model_len=128), lag=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.current_stream()
        admit_all(hand, 8)
        decode(hand, 3)
        hand.finish()
        assert torch.cuda.current_stream() == before
        assert not torch.is_inference_mode_enabled()
    assert all(len(request.outputs) == 4 for request in hand.requests.values())


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"num_logprobs": 2},
        {"logit_bias": ((300, 5.0),), "bad_words_ids": ((40, 50),)},
    ],
    ids=str,
)
def test_no_launch_synchronises_in_hiding(tiny_spm, sampling):
    executor = make_executor(tiny_spm, max_model_len=128)
    launch = executor._runner.launch

    def watched(step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor._runner.launch = watched
    hand = ByHand(executor, lag=1)
    admit_all(hand, 3, **sampling)
    decode(hand, 4)
    hand.admit(3, RNG.integers(3, 345, size=40), **sampling)
    hand.step({0: 1, 1: 1, 2: 1, 3: 10})
    hand.release(1)
    hand.step({0: 1, 2: 1, 3: 30})
    hand.finish()
    assert len(hand.requests[0].outputs) == 7


@pytest.mark.parametrize("num_requests", [3, 5, 7])
def test_padding_rows_leave_the_last_block_alone(tiny_spm, num_requests):
    """A negative slot that is not skipped would be the last slot of the pool."""
    outputs = []
    for settings in ({"enforce_eager": True}, {"cuda_graph_sizes": [4, 8]}):
        executor = make_executor(
            tiny_spm,
            max_model_len=128,
            num_gpu_blocks_override=3 * num_requests,
            schedule_conservativeness=0.0,
            **settings,
        )
        hand = ByHand(executor, lag=1)
        for row in range(num_requests):
            hand.admit(row, range(10 + row, 30 + row))
        hand.step(dict.fromkeys(hand.requests, 20))
        decode(hand, 25)
        hand.finish()
        assert max(max(request.blocks) for request in hand.requests.values()) == hand.next_block - 1
        assert hand.next_block == 3 * num_requests, "the pool is full"
        outputs.append([request.outputs for request in hand.requests.values()])
    assert outputs[0] == outputs[1]


def test_prompt_logprobs_beside_graphs_are_those_of_single_launches(tiny_spm):
    """A graph keeps the hidden states of sampled tokens alone."""
    found = []
    for settings in ({"enforce_eager": True}, {}):
        executor = make_executor(tiny_spm, max_model_len=128, **settings)
        while executor.prepare():
            pass
        hand = ByHand(executor)
        hand.admit(0, range(10, 30))
        hand.step({0: 20})
        request = hand.admit(1, range(40, 90), num_prompt_logprobs=1)
        for count in (20, 29, 1):
            hand.step({0: 1, 1: count})
        other = hand.admit(2, range(60, 80))
        hand.step({0: 1, 1: 1, 2: 20})
        hand.finish()
        assert len(request.prompt_logprobs) == 49
        ids = [entry.ids.tolist() for entry in request.prompt_logprobs]
        values = np.concatenate([entry.logprobs for entry in request.prompt_logprobs])
        found.append((ids, request.outputs, other.outputs, values))
    assert found[0][:3] == found[1][:3]
    np.testing.assert_allclose(found[0][3], found[1][3], atol=1e-4)


def test_graphs_of_8_bits_give_the_tokens_of_single_launches(tiny_spm):
    outputs = []
    for settings in ({"enforce_eager": True}, {"cuda_graph_sizes": [4, 8]}):
        settings |= {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
        hand = ByHand(make_executor(tiny_spm, max_model_len=128, **settings), lag=1)
        for row in range(4):
            hand.admit(row, range(10 + row, 30 + row))
        hand.step(dict.fromkeys(hand.requests, 20))
        decode(hand, 20)
        hand.finish()
        outputs.append([request.outputs for request in hand.requests.values()])
    assert outputs[0] == outputs[1]


@pytest.fixture
def compiled():
    """Names of the kernels that are compiled during a test, from where it clears the list."""
    names = []
    knobs.runtime.jit_post_compile_hook = lambda **event: names.append(event["repr"])
    yield names
    knobs.runtime.jit_post_compile_hook = None


@pytest.mark.parametrize("bits", [{}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}])
def test_no_request_waits_for_a_compiler(bits, tiny_spm, compiled):
    executor = make_executor(tiny_spm, max_model_len=128, dtype="bfloat16", **bits)
    hand = ByHand(executor, lag=1)
    compiled.clear()
    admit_all(hand, 1, temperature=0.7, top_p=0.9)
    decode(hand, 3)
    hand.admit(1, range(10, 40), temperature=0.7)
    hand.step({0: 1, 1: 17})
    hand.step({0: 1, 1: 13})
    decode(hand, 3)
    for row, count in enumerate((0, 1, 3, 20), start=2):
        hand.admit(row, range(10, 20), num_logprobs=count, num_prompt_logprobs=count)
        hand.step(dict.fromkeys(hand.requests, 1) | {row: 10})
    decode(hand, 2)
    hand.finish()
    assert compiled == []


def test_no_size_of_batch_waits_for_a_compiler(tiny_spm, compiled):
    runner = make_executor(tiny_spm, max_num_seqs=600, max_num_batched_tokens=1024)._runner
    compiled.clear()
    with torch.inference_mode(), torch.cuda.stream(runner._stream):
        for shape in runner._graph_shapes:
            for has_edits in (False, True):
                runner._step_uploads.send_padding(shape)
                runner.graphs.run(shape, has_edits=has_edits)
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.95, 0.98])
def test_capture_stays_within_the_share_of_memory(tmp_path, utilization):
    """Weights do not matter here: pool and graphs are those of a large vocabulary."""
    fields = {"hidden_size": 1024, "vocab_size": 151_936, "max_position_embeddings": 4096}
    config = tiny_config("qwen3", tie_word_embeddings=True, **fields).to_dict()
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    others = total - torch.cuda.mem_get_info()[0]
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        gpu_memory_utilization=utilization,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
    )
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}] * 512
    params = [
        SamplingParams(max_tokens=2 + n // 3, ignore_eos=True, detokenize=False) for n in range(512)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    runner = llm.llm_engine._client._core._executor._runner
    while runner.prepare():  # as a server captures while it is idle
        pass
    assert len(runner.graphs.captured_shapes) > 20
    used = total - torch.cuda.mem_get_info()[0] - others
    assert used <= utilization * total
    llm.shutdown()
