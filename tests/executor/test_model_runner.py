"""Steps on a tiny network give what transformers gives, however they are cut."""

import numpy as np
import pytest
import torch

from octavo.executor.step import BlockCopy
from tests.executor.by_hand import ByHand, generate, make_executor
from tests.steps import make_row, make_step

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 345, size=length).tolist() for length in (5, 16, 33, 47)]


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("lag", [0, 1])
def test_greedy_tokens_are_those_of_transformers(oracle, block_size, lag):
    executor = make_executor(
        oracle.folder, lag=lag, block_size=block_size, num_gpu_blocks_override=512 // block_size
    )
    expected = [oracle.generate(prompt, 32) for prompt in PROMPTS]
    assert generate(executor, PROMPTS, 32, lag=lag, chunk=16) == expected


def test_a_row_reads_blocks_that_another_row_writes_in_the_same_step(llama):
    prefix, tail = PROMPTS[2][:32], [7, 8, 9]
    hand = ByHand(make_executor(llama.folder))
    writer = hand.admit(0, PROMPTS[2])
    reader = hand.admit(1, prefix + tail, blocks=writer.blocks[:2], computed=32)
    hand.step({1: 3, 0: 33})
    hand.decode(7)
    assert reader.outputs == llama.generate(prefix + tail, 8)
    assert writer.outputs == llama.generate(PROMPTS[2], 8)


def test_a_copied_block_serves_like_its_source(llama):
    prefix = PROMPTS[2][:16]
    hand = ByHand(make_executor(llama.folder))
    first = hand.admit(0, prefix)
    hand.step({0: 16})
    second = hand.admit(1, [*prefix, 5], blocks=[40], computed=16)
    hand.step({1: 1}, copies=[BlockCopy(first.blocks[0], 40)])
    assert second.outputs == llama.generate([*prefix, 5], 1)


def test_steps_on_a_cpu_need_no_preparation(llama):
    assert not make_executor(llama.folder).prepare()


def test_a_readmitted_request_goes_on_as_if_it_had_stayed(llama):
    hand = ByHand(make_executor(llama.folder))
    first = hand.admit(0, PROMPTS[1], seed=5, temperature=1.5)
    hand.step({0: 16})
    hand.decode(9)
    hand.release(0)
    second = hand.admit(3, PROMPTS[1] + first.outputs[:4], num_prompt=16, seed=5, temperature=1.5)
    hand.step({3: 20})
    hand.decode(5)
    assert second.outputs == first.outputs[4:]


def test_a_row_that_was_released_serves_another_request(llama):
    executor = make_executor(llama.folder)
    for prompt in PROMPTS:
        assert generate(executor, [prompt], 4) == [llama.generate(prompt, 4)]


def test_sampled_tokens_do_not_depend_on_company_place_or_chunks(llama):
    executor = make_executor(llama.folder)
    params = {"seed": 11, "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.1}
    (alone,) = generate(executor, [PROMPTS[3]], 12, **params)
    together = generate(executor, PROMPTS, 12, chunk=7, **params)
    assert together[3] == alone


@pytest.mark.parametrize("chunk", [1000, 16])
def test_prompt_logprobs_are_those_of_transformers(llama, chunk):
    prompt = PROMPTS[3]
    hand = ByHand(make_executor(llama.folder))
    other = hand.admit(1, PROMPTS[2])
    request = hand.admit(0, prompt, num_prompt_logprobs=2)
    while not request.outputs:
        hand.step({r.row: min(chunk, r.num_tokens - r.num_computed) for r in (other, request)})
    expected = llama.compute_logits(prompt).log_softmax(-1)
    assert len(request.prompt_logprobs) == len(prompt) - 1
    assert not other.prompt_logprobs
    for position, entry in enumerate(request.prompt_logprobs):
        row = expected[position]
        assert entry.ids[0] == prompt[position + 1]
        assert entry.ids[1:].tolist() == row.topk(2).indices.tolist()
        np.testing.assert_allclose(entry.logprobs, row[entry.ids], atol=1e-4)
        assert entry.rank == int((row > row[prompt[position + 1]]).sum()) + 1


def test_a_long_prompts_logits_are_computed_in_slices(llama, monkeypatch):
    monkeypatch.setattr("octavo.executor.model_runner.MAX_LOGIT_ROWS", 10)
    hand = ByHand(make_executor(llama.folder))
    request = hand.admit(0, PROMPTS[3], num_prompt_logprobs=0)
    hand.step({0: 47})
    expected = llama.compute_logits(PROMPTS[3]).log_softmax(-1)[range(46), PROMPTS[3][1:]]
    found = [entry.logprobs[0] for entry in request.prompt_logprobs]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_logprobs_belong_to_the_rows_that_asked(llama):
    hand = ByHand(make_executor(llama.folder))
    silent = hand.admit(0, PROMPTS[0])
    asking = hand.admit(1, PROMPTS[1], num_logprobs=3)
    hand.step({0: 5, 1: 16})
    row = llama.compute_logits(PROMPTS[1])[-1].log_softmax(-1)
    (entry,) = asking.logprobs
    assert not silent.logprobs
    assert entry.ids.tolist() == [asking.outputs[0], *row.topk(3).indices.tolist()]
    np.testing.assert_allclose(entry.logprobs, row[entry.ids], atol=1e-4)
    assert entry.rank == 1


def test_a_row_with_nan_ends_with_an_error_and_the_others_do_not_notice(llama):
    executor = make_executor(llama.folder)
    with torch.no_grad():
        executor._runner._model.network.embed_tokens.matrix.weight[300] = torch.nan
    hand = ByHand(executor)
    prompts = [[5, 6, 7], [5, 300, 7], [8, 9]]
    requests = [hand.admit(row, prompt) for row, prompt in enumerate(prompts)]
    hand.step({0: 3, 1: 3, 2: 2})
    assert [request.error is not None for request in requests] == [False, True, False]
    assert requests[0].outputs == llama.generate(prompts[0], 1)
    assert requests[2].outputs == llama.generate(prompts[2], 1)


def test_non_finite_prompt_logits_are_an_error_of_their_row(llama):
    executor = make_executor(llama.folder)
    with torch.no_grad():
        executor._runner._model.network.embed_tokens.matrix.weight[300] = torch.nan
    hand = ByHand(executor)
    request = hand.admit(0, [5, 300, 7, 8], num_prompt_logprobs=1)
    hand.step({0: 3})
    assert "not finite" in request.error
    assert not request.prompt_logprobs


def test_rows_of_a_step_that_failed_can_be_released(llama):
    executor = make_executor(llama.folder)
    bad = make_row(0, token_ids=[5, 100_000], blocks=(0,))
    with pytest.raises(IndexError):
        executor.submit(make_step(0, [(0, 2, 0, True)], new=[bad]))
    good = make_row(0, number=1, token_ids=PROMPTS[0], blocks=(0,))
    handle = executor.submit(make_step(1, [(0, 5, 0, True)], new=[good], released=[0]))
    assert handle.result().token_ids.tolist() == llama.generate(PROMPTS[0], 1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (make_step(1, [(0, 2, 5, False)]), "ahead of its rows"),
        (make_step(1, [(7, 1, 0, True)]), "nobody has"),
        (make_step(1, released=[7]), "nobody has it"),
        (make_step(1, new=[make_row(0, number=9)]), "taken by two requests"),
    ],
)
def test_steps_that_contradict_the_rows_are_refused(llama, step, message):
    hand = ByHand(make_executor(llama.folder))
    hand.admit(0, PROMPTS[0])
    hand.step({0: 5})
    with pytest.raises(AssertionError, match=message):
        hand.executor.submit(step)


def test_results_carry_the_number_of_the_step(llama):
    executor = make_executor(llama.folder)
    step = make_step(3, [(0, 6, 0, True)], new=[make_row()])
    assert executor.submit(step).result().step_id == 3
