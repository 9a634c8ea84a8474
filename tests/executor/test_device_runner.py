"""The GPU's runner, its kernels in Triton's interpreter: every step gives what the CPU's gives.

Graphs, streams and pinned memory need a device: see the gpu tests of tests/engine/test_equivalence.
"""

import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.attention.triton_backend import TritonBackend
from octavo.executor.device_runner import DeviceRunner, list_varied_rows
from octavo.executor.graphs import StepGraphs
from octavo.executor.in_process import InProcessExecutor
from octavo.executor.step import BlockCopy, ExecutorInfo
from octavo.executor.step_program import StepProgram, StepShape
from octavo.models.config_files import load_config
from octavo.models.loader import load_model
from octavo.models.ops import linear_hopper
from tests.executor.by_hand import ByHand, generate, make_executor
from tests.models.oracle import source_of

CPU = torch.device("cpu")
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 345, size=length).tolist() for length in (3, 6)]


def make_device_executor(folder, *, lag=0, num_rows=4, block_size=4, graphs=()):
    """Load a checkpoint into a DeviceRunner whose device is the interpreter."""
    source = source_of(folder)
    config = load_config(source)
    model = load_model(source, config, dtype=torch.float32, device=CPU)
    info = ExecutorInfo(
        num_blocks=48,
        block_size=block_size,
        num_rows=num_rows,
        vocab_size=config.vocab_size,
        max_model_len=96,
        cache_namespace=b"",
        dtype="float32",
        attention_backend="triton",
    )
    backend = TritonBackend(
        model.kv_cache_spec(block_size), info.num_blocks, dtype=torch.float32, device="cpu"
    )
    shapes = [StepShape.padded(*shape) for shape in graphs]
    runner = DeviceRunner(model, backend, info, device=CPU, graph_shapes=shapes)
    return InProcessExecutor(runner, lag=lag)


class LaunchedAgain:
    """What stands for a graph without a device: replaying it launches the same kernels singly."""

    def __init__(self, launch):
        self.replay = launch


@pytest.fixture
def fake_graphs(monkeypatch):
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(StepGraphs, "_record", lambda graphs, launch: LaunchedAgain(launch))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)


def test_greedy_tokens_in_chunks_are_those_of_transformers(oracle):
    executor = make_device_executor(oracle.folder, lag=1)
    expected = [oracle.generate(prompt, 3) for prompt in PROMPTS]
    assert generate(executor, PROMPTS, 3, lag=1, chunk=4) == expected


def test_tables_grow_by_one_block_or_several(small_llama):
    executor = make_device_executor(small_llama.folder, block_size=2)
    assert generate(executor, PROMPTS[:1], 6) == [small_llama.generate(PROMPTS[0], 6)]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 7, "top_p": 0.8, "top_k": 40},
        {"temperature": 1.0, "seed": 7, "min_p": 0.05, "repetition_penalty": 1.3},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"logit_bias": ((300, 50.0),), "min_tokens": 2, "held_back_ids": (300,)},
        {"allowed_token_ids": (40, 50, 60), "bad_words_ids": ((40, 50), (60,))},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_every_parameter_chooses_what_the_cpu_chooses(small_llama, sampling):
    on_device = generate(make_device_executor(small_llama.folder), PROMPTS, 3, **sampling)
    assert on_device == generate(make_executor(small_llama.folder), PROMPTS, 3, **sampling)


def test_rows_with_and_without_edits_share_a_step(small_llama):
    hand = ByHand(make_device_executor(small_llama.folder))
    hand.admit(0, PROMPTS[0])
    hand.admit(1, PROMPTS[1], logit_bias=((300, 90.0),))
    hand.step({0: 3, 1: 6})
    plain, biased = hand.requests[0], hand.requests[1]
    hand.decode(2)
    assert plain.outputs == small_llama.generate(PROMPTS[0], 3)
    assert biased.outputs == [300, 300, 300]


def test_logprobs_and_prompt_logprobs_are_those_of_the_cpu(small_llama, fake_graphs):
    found = []
    on_device = make_device_executor(small_llama.folder, graphs=[(2, 2), (2, 8)])
    while on_device.prepare():  # graphs keep the hidden states of sampled tokens alone
        pass
    for executor in (on_device, make_executor(small_llama.folder)):
        hand = ByHand(executor)
        hand.admit(0, PROMPTS[0])
        request = hand.admit(1, PROMPTS[1], num_logprobs=3, num_prompt_logprobs=2)
        hand.step({0: 3, 1: 4})
        hand.step({0: 1, 1: 2})
        hand.decode(2)
        found.append(request.prompt_logprobs + request.logprobs)
    assert len(found[0]) == len(found[1]) == 5 + 3
    for ours, expected in zip(*found, strict=True):
        assert ours.ids.tolist() == expected.ids.tolist()
        assert ours.rank == expected.rank
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-4)


def test_a_copied_block_serves_like_its_source(small_llama):
    prefix = PROMPTS[1][:4]
    hand = ByHand(make_device_executor(small_llama.folder))
    first = hand.admit(0, prefix)
    hand.step({0: 4})
    second = hand.admit(1, [*prefix, 5], blocks=[40], computed=4)
    hand.step({1: 1}, copies=[BlockCopy(first.blocks[0], 40)])
    assert second.outputs == small_llama.generate([*prefix, 5], 1)


def test_a_step_that_samples_nothing_returns_no_token(small_llama):
    hand = ByHand(make_device_executor(small_llama.folder))
    request = hand.admit(0, PROMPTS[1])
    hand.step({0: 4})
    assert request.outputs == []
    hand.step({0: 2})
    assert request.outputs == small_llama.generate(PROMPTS[1], 1)


def test_hidden_states_are_selected_where_not_all_tokens_sample_and_at_least_one(small_llama):
    executor = make_device_executor(small_llama.folder)
    counts = []

    def note(_, args):
        wanted = args[2]
        counts.append(None if wanted is None else len(wanted))

    executor._runner._state.model.register_forward_pre_hook(note)
    hand = ByHand(executor)
    hand.admit(0, PROMPTS[0])
    hand.admit(1, PROMPTS[1])
    hand.step({0: 2, 1: 3})
    hand.step({0: 1, 1: 3})
    hand.decode(1)
    assert counts == [1, 2, None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter
def test_a_row_with_non_finite_logits_errs_alone(small_llama):
    executor = make_device_executor(small_llama.folder)
    hand = ByHand(executor)
    bad, good = hand.admit(0, PROMPTS[0]), hand.admit(1, PROMPTS[1])
    block = bad.blocks[0]
    hand.step({0: 2, 1: 6})
    executor._runner._state.backend.kv_pool[block, 0, 1, 0] = float("nan")
    hand.step({0: 1, 1: 1})
    assert "not finite" in bad.error
    assert good.error is None
    assert good.outputs == small_llama.generate(PROMPTS[1], 2)


def test_more_admissions_than_an_upload_holds_take_several(small_llama):
    executor = make_device_executor(small_llama.folder)
    executor._runner._uploads.capacity = 50
    expected = [small_llama.generate(prompt, 2) for prompt in PROMPTS]
    assert generate(executor, PROMPTS, 2) == expected


def test_a_decode_step_is_padded_to_its_graph_even_after_prompt_logprobs(small_llama, fake_graphs):
    executor = make_device_executor(small_llama.folder, graphs=[(4, 4)])
    hand = ByHand(executor)
    request = hand.admit(0, PROMPTS[0], num_prompt_logprobs=1)
    hand.step({0: 3})
    assert executor._runner.graphs.captured_shapes == []
    hand.decode(1)
    assert executor._runner.graphs.captured_shapes == [StepShape.padded(4, 4)]
    hand.decode(1)
    assert len(request.prompt_logprobs) == 2
    assert request.outputs == small_llama.generate(PROMPTS[0], 3)


def test_steps_with_prompts_fit_graphs(small_llama, fake_graphs, monkeypatch):
    """Chunks that sample and that do not, rows that decode, and steps beyond every shape."""
    monkeypatch.setattr("octavo.executor.graphs.CAPTURE_ROWS", 0)
    executor = make_device_executor(small_llama.folder, lag=1, graphs=[(2, 2), (2, 4), (4, 6)])
    hand = ByHand(executor, lag=1)
    requests = [hand.admit(0, PROMPTS[0]), hand.admit(1, PROMPTS[1])]
    hand.step({0: 3})  # 1 row of 3 tokens
    hand.step({0: 1, 1: 3})
    hand.step({0: 1, 1: 1})  # no tokens but one a row, of which one samples
    hand.step({0: 1, 1: 2})
    hand.decode(2)
    hand.admit(2, [*PROMPTS[1], *PROMPTS[0]])
    hand.step({0: 1, 1: 1, 2: 9})  # fits none
    hand.finish()
    captured = executor._runner.graphs.captured_shapes
    assert captured == [StepShape.padded(2, 2), StepShape.padded(2, 4)]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.outputs == small_llama.generate(prompt, len(request.outputs))


def test_prompt_logprobs_which_no_graph_has_are_no_reason_to_capture(
    small_llama, fake_graphs, monkeypatch
):
    monkeypatch.setattr("octavo.executor.graphs.CAPTURE_ROWS", 3)
    executor = make_device_executor(small_llama.folder, graphs=[(1, 4), (1, 6)])
    hand = ByHand(executor)
    hand.admit(0, PROMPTS[1])
    hand.step({0: 6})
    hand.admit(1, PROMPTS[0], num_prompt_logprobs=1)
    hand.step({1: 3})
    request = hand.admit(2, PROMPTS[0])
    hand.step({2: 3})  # padded by 2
    assert executor._runner.graphs.captured_shapes == [StepShape.padded(1, 6)]
    assert request.outputs == small_llama.generate(PROMPTS[0], 1)


def test_steps_of_a_shape_without_a_graph_are_padded_to_a_captured_one(small_llama, fake_graphs):
    runner = make_device_executor(small_llama.folder, graphs=[(2, 2), (3, 3), (4, 4)])._runner
    runner.warm_up()
    captured = runner.graphs.captured_shapes
    assert captured == [StepShape.padded(2, 2), StepShape.padded(4, 4)]
    hand = ByHand(InProcessExecutor(runner, lag=0))
    requests = [hand.admit(row, PROMPTS[0]) for row in range(3)]
    hand.step({0: 3, 1: 3, 2: 3})
    hand.decode(2)
    assert runner.graphs.captured_shapes == captured
    expected = small_llama.generate(PROMPTS[0], 3)
    assert [request.outputs for request in requests] == [expected] * 3


def test_shapes_are_captured_one_by_one_in_times_without_steps(small_llama, fake_graphs):
    shapes = [(2, 2), (2, 4), (4, 4)]
    executor = make_device_executor(small_llama.folder, graphs=shapes)
    hand = ByHand(executor)
    request = hand.admit(0, PROMPTS[0])
    hand.step({0: 3})
    calls = 0
    while executor.prepare():
        calls += 1
        hand.decode(1)
    assert calls == len(shapes) - 1, "the first step captured one itself"
    captured = executor._runner.graphs.captured_shapes
    assert {(shape.num_rows, shape.num_tokens) for shape in captured} == set(shapes)
    assert request.outputs == small_llama.generate(PROMPTS[0], 1 + calls)


def test_shapes_without_memory_are_left_out_and_serve_all_the_same(
    small_llama, fake_graphs, caplog
):
    executor = make_device_executor(small_llama.folder, graphs=[(1, 1), (1, 4)])
    graphs = executor._runner.graphs

    def fail(shape, *, has_edits):
        raise torch.OutOfMemoryError

    graphs.run = fail
    assert executor.prepare()
    assert executor.prepare()
    assert not executor.prepare()
    assert [message.split("(")[0] for message in caplog.messages] == [
        "no memory to capture StepShape"
    ] * 2
    del graphs.run
    hand = ByHand(executor)
    request = hand.admit(0, PROMPTS[0])
    hand.step({0: 3})
    hand.decode(2)
    assert request.outputs == small_llama.generate(PROMPTS[0], 3)
    assert graphs.captured_shapes == []


def test_warming_up_launches_singly_then_captures_small_sizes_and_edits(
    small_llama, fake_graphs, monkeypatch
):
    sizes = [(2, 2), (3, 3), (4, 4), (4, 8)]
    runner = make_device_executor(small_llama.folder, graphs=sizes)._runner
    events = []
    forward, record = StepProgram.forward, StepGraphs._record

    def note_launch(program):
        events.append(program.shape.num_tokens)
        forward(program)

    def note_capture(graphs, launch):
        events.append("capture")
        return record(graphs, launch)

    monkeypatch.setattr(StepProgram, "forward", note_launch)
    monkeypatch.setattr(StepGraphs, "_record", note_capture)
    runner.warm_up()
    single = events[: events.index("capture")]
    assert single == [2, 2 * linear_hopper.MAX_ROWS], "both keep memory for the stream"
    assert events.count("capture") == 2 * 2 + 1, "forward and sample of two sizes, edits of one"
    assert runner.graphs.captured_shapes == [StepShape.padded(2, 2), StepShape.padded(4, 4)]


def test_a_runner_is_freed_with_its_last_reference(small_llama, fake_graphs):
    """Pinned memory that waits for Python's collector may be freed within a later capture."""
    executor = make_device_executor(small_llama.folder, graphs=[(1, 1), (1, 4)])
    generate(executor, PROMPTS[:1], 2, logit_bias=((300, 90.0),))
    uploads = weakref.ref(executor._runner._uploads)
    del executor
    assert uploads() is None


def test_profiling_computes_a_slice_of_prompt_logits(small_llama, fake_graphs, monkeypatch):
    runner = make_device_executor(small_llama.folder)._runner
    monkeypatch.setattr("octavo.executor.device_runner.MAX_LOGIT_ROWS", 5)
    model, num_rows = runner._state.model, []
    compute_logits = model.compute_logits

    def record(hidden):
        num_rows.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(model, "compute_logits", record)
    runner.profile(num_tokens=6)
    assert num_rows == [4, 5]


@pytest.mark.parametrize("most", [7, 8, 200, 4096])
def test_numbers_of_rows_lie_within_eight_or_a_24th(most):
    found = list_varied_rows(most)
    for number, following in pairwise([0, *found, most]):
        assert 0 <= following - number <= max(8, number / 24)
    assert len(found) < 120
