"""The offline class on tiny checkpoints: texts, stops, samples and log-probabilities."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import BatchRefusedError, InvalidRequestError, SamplingParams
from tests.checkpoints import BOS_ID
from tests.entrypoints.offline import (
    GREEDY,
    generate,
    start,
    stream,
    texts,
    write_generation_config,
)


@pytest.fixture(scope="module")
def tiny(tiny_spm):
    with start(tiny_spm) as llm:
        yield llm


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "overlapped"])
def letters(chain_letters, request):
    with start(chain_letters, async_scheduling=request.param) as llm:
        yield llm


# Stops


@pytest.mark.parametrize(
    ("params", "text", "finish_reason", "stop_reason"),
    [
        ({"stop": ["def"]}, "abc", "stop", "def"),
        ({"stop": "def", "include_stop_str_in_output": True}, "abcdef", "stop", "def"),
        ({"stop": ["dex"]}, "abcdefghij", "stop", None),
        ({"stop": ["ij", "cd"]}, "ab", "stop", "cd"),
        ({"stop": ["ef"], "max_tokens": 5}, "abcde", "length", None),
        ({"stop": ["z"]}, "abcdefghij", "stop", None),
        ({"stop": ["b"], "min_tokens": 3}, "abcdefghij", "stop", None),
        ({"stop": ["b"], "min_tokens": 2}, "a", "stop", "b"),
        ({"stop_token_ids": [263]}, "abc", "stop", 263),
        ({"stop_token_ids": [263], "include_stop_str_in_output": True}, "abcd", "stop", 263),
    ],
)
def test_stop_cuts_the_text_equally_in_both_modes(
    letters, params, text, finish_reason, stop_reason
):
    params = {"max_tokens": 20, **params}
    answer = generate(letters, **params)
    (pieces,) = stream(letters, **params)
    assert answer.text == "".join(texts(pieces)) == text
    for final in (answer, pieces[-1]):
        assert (final.finish_reason, final.stop_reason) == (finish_reason, stop_reason)
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids


def test_nothing_of_a_stop_string_is_streamed(letters):
    (pieces,) = stream(letters, stop=["def", "jx"], max_tokens=20)
    assert texts(pieces) == ["a", "b", "c", "", "", ""]


def test_end_token_is_the_last_id_and_no_text(letters):
    answer = generate(letters, max_tokens=20, skip_special_tokens=False)
    assert (len(answer.token_ids), answer.token_ids[-1], answer.text) == (11, 2, "abcdefghij")
    answer = generate(letters, max_tokens=12, ignore_eos=True, skip_special_tokens=False)
    assert answer.text.startswith("abcdefghij</s>")
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("prompt", ["hi", [5] * 60])
@pytest.mark.parametrize("eos_id", [2, 9])
def test_min_tokens_holds_back_every_end_token_and_counts_output_alone(
    tiny_two_ends, prompt, eos_id
):
    params = {"logit_bias": {eos_id: 1000.0}, "max_tokens": 12}
    assert len(generate(tiny_two_ends, prompt, min_tokens=4, **params).token_ids) == 5
    assert len(generate(tiny_two_ends, prompt, **params).token_ids) == 1
    ignoring = generate(tiny_two_ends, prompt, min_tokens=4, ignore_eos=True, **params)
    assert len(ignoring.token_ids) == 12


@pytest.fixture(scope="module")
def tiny_two_ends(tiny_spm, tmp_path_factory):
    """tiny_spm with a second end token in generation_config.json."""
    folder = tmp_path_factory.mktemp("models") / "two-ends"
    write_generation_config(tiny_spm, folder, eos_token_id=[2, 9])
    with start(folder) as llm:
        yield llm


# Text


def test_character_of_several_tokens_is_streamed_whole(chain_emoji):
    with start(chain_emoji) as llm:
        (pieces,) = stream(llm)
        assert texts(pieces) == ["", "", "", "😀", "    ", "b", ""]
        assert generate(llm).text == "😀    b"


def test_half_a_character_at_the_end_is_the_same_in_both_modes(chain_halfchar):
    with start(chain_halfchar) as llm:
        (pieces,) = stream(llm)
        assert generate(llm).text == "".join(texts(pieces)) == "a\ufffd"
        cut = generate(llm, max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("a\ufffd", "length")


def test_chat_has_one_bos_and_completions_have_one(tiny):
    (chat,) = tiny.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert (len(chat.prompt_token_ids), chat.prompt_token_ids[:2]) == (22, [BOS_ID, 259])
    (plain,) = tiny.generate("hi", GREEDY, use_tqdm=False)
    assert plain.prompt_token_ids == [BOS_ID, 259, 267, 268]


def test_chats_are_answered_in_order_and_refused_one_by_one(tiny):
    hello, broken = [{"role": "user", "content": "hi"}], [{"content": "hi"}]
    outputs = tiny.chat([hello, hello], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    with pytest.raises(
        BatchRefusedError, match="prompt 1: each message must have a role"
    ) as caught:
        tiny.chat([hello, broken], GREEDY, use_tqdm=False)
    assert caught.value.outputs[0].prompt == outputs[0].prompt
    with pytest.raises(InvalidRequestError, match="messages must be a list with at least one"):
        tiny.chat([], GREEDY)


def test_model_without_a_template_completes_but_does_not_chat(tiny_no_template, tmp_path):
    hello = [{"role": "user", "content": "hi"}]
    with start(tiny_no_template) as llm:
        assert generate(llm, "hi").finished
        with pytest.raises(InvalidRequestError, match="no chat template"):
            llm.chat(hello, GREEDY)
        (output,) = llm.chat(
            hello, GREEDY, chat_template="{{ messages[0].content }}", use_tqdm=False
        )
    assert output.prompt == "hi"


# Sampling


def test_answers_with_a_seed_differ_and_repeat(tiny):
    params = {"n": 3, "seed": 42, "temperature": 1.0, "max_tokens": 16}
    first, second = (
        [answer.token_ids for answer in output.outputs]
        for output in tiny.generate(["hi", "hi"], SamplingParams(**params), use_tqdm=False)
    )
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3
    streamed = stream(tiny, "hi", **params)
    assert [[i for piece in pieces for i in piece.token_ids] for pieces in streamed] == first
    assert [len([p for p in pieces if p.finished]) for pieces in streamed] == [1, 1, 1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"block_size": 1, "num_gpu_blocks_override": 512},
        {"block_size": 4, "num_gpu_blocks_override": 24, "schedule_conservativeness": 0},
    ],
    ids=["together", "no cache", "chunks", "small blocks", "retraction"],
)
def test_answers_to_one_prompt_are_those_of_separate_requests(tiny_spm, settings):
    prompt = {"prompt_token_ids": [BOS_ID, *range(100, 139)]}
    # At this temperature three answers are greedy ones, so that they have an oracle.
    three = SamplingParams(n=3, temperature=1e-4, seed=1, max_tokens=24, ignore_eos=True)
    with start(tiny_spm) as llm:
        greedy = generate(llm, prompt, max_tokens=24, ignore_eos=True).token_ids
    with start(tiny_spm, max_model_len=96, **settings) as llm:
        (output,) = llm.generate(prompt, three, use_tqdm=False)
    assert [answer.token_ids for answer in output.outputs] == [greedy] * 3
    assert ("schedule_conservativeness" in settings) == (output.metrics.num_retractions > 0)


def test_answers_go_on_when_one_of_them_ends(tiny):
    params = {"n": 3, "seed": 42, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    whole = tiny.generate("hi", SamplingParams(**params), use_tqdm=False)[0].outputs
    stop_id = whole[1].token_ids[3]
    cut = tiny.generate("hi", SamplingParams(**params, stop_token_ids=[stop_id]), use_tqdm=False)[
        0
    ].outputs
    for before, after in zip(whole, cut, strict=True):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        assert after.finish_reason == ("stop" if stop_id in before.token_ids else "length")
    assert len(cut[1].token_ids) <= 4


def test_run_without_seeds_repeats_with_the_engines(tiny_spm):
    def run(**settings):
        with start(tiny_spm, **settings) as llm:
            outputs = llm.generate(["hi", "hi"], SamplingParams(temperature=1), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = run()
    assert first[0] != first[1]
    assert first == run()
    assert first != run(seed=1)


# Log-probabilities


@pytest.fixture(scope="module")
def oracle(tiny_spm):
    return AutoModelForCausalLM.from_pretrained(tiny_spm, dtype=torch.float32).eval()


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("budget", [16, 1024])
def test_prompt_logprobs_are_those_of_the_model_also_the_second_time(
    tiny_spm, oracle, budget, max_tokens
):
    prompt = [BOS_ID, *range(100, 141)]
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with start(tiny_spm, block_size=16, max_num_batched_tokens=budget) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
        for _ in range(2):
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            first, *others = output.prompt_logprobs
            assert first is None
            assert len(output.outputs[0].token_ids) == max_tokens
            assert [next(iter(entry)) for entry in others] == prompt[1:]
            values = [entry[token].logprob for entry, token in zip(others, prompt[1:], strict=True)]
            wanted = expected[torch.arange(41), torch.tensor(prompt[1:])].tolist()
            assert values == pytest.approx(wanted, abs=1e-3)


def test_logprobs_of_the_answer_are_those_of_the_model(tiny, oracle):
    prompt = [BOS_ID, *range(100, 110)]
    answer = generate(tiny, {"prompt_token_ids": prompt}, max_tokens=4, logprobs=3)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + answer.token_ids])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for entry, token, row in zip(answer.logprobs, answer.token_ids, expected, strict=True):
        assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
        top = row.topk(3)
        assert set(entry) == {token, *top.indices.tolist()}
        assert entry[token].rank == 1
    own = [
        entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    assert answer.cumulative_logprob == pytest.approx(sum(own))
