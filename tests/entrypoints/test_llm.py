"""The offline class on tiny checkpoints: what may be asked of it."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from octavo import (
    BatchRefusedError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    SamplingParams,
)
from tests.checkpoints import BOS_ID
from tests.entrypoints.offline import GREEDY, generate, start, write_generation_config


@pytest.fixture(scope="module")
def tiny(tiny_spm):
    with start(tiny_spm) as llm:
        yield llm


@pytest.fixture(scope="module")
def letters(chain_letters):
    with start(chain_letters) as llm:
        yield llm


def test_one_prompt_or_many_come_back_in_order(letters):
    ids = letters.get_tokenizer().encode("z")
    for prompt in ("z", ids, {"prompt": "z"}, {"prompt_token_ids": ids}):
        (output,) = letters.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].text == "abcdefghij"
        assert (output.prompt_token_ids, output.finished) == (ids, True)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3, 2)]
    outputs = letters.generate(["z", {"prompt": "z"}, ids], params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["a", "abc", "ab"]
    assert letters.generate([], GREEDY) == []


def test_calls_of_several_threads_take_turns(tiny):
    prompts = [[[5 + place, 9]] * 3 for place in range(6)]
    message = [{"role": "user", "content": "hi"}]

    def generate_ids(prompt):
        return [output.outputs[0].token_ids for output in tiny.generate(prompt, GREEDY)]

    alone = [generate_ids(prompt) for prompt in prompts]
    answered = tiny.chat(message, GREEDY)[0].outputs[0].token_ids
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(generate_ids, prompts)
        chats = [threads.submit(tiny.chat, message, GREEDY) for _ in range(4)]
        resets = [threads.submit(tiny.reset_prefix_cache) for _ in range(4)]
        assert list(together) == alone
    assert [chat.result()[0].outputs[0].token_ids for chat in chats] == [answered] * 4
    assert [reset.result() for reset in resets] == [True] * 4


def test_parameters_are_left_as_they_were(letters):
    params = SamplingParams(temperature=0, max_tokens=1)
    letters.generate("z", params, use_tqdm=False)
    assert params == SamplingParams(temperature=0, max_tokens=1)


def test_lists_of_other_lengths_than_the_prompts_are_refused(letters):
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
        letters.generate(["z", "z"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="priority has 1 entries for 2 prompts"):
        letters.generate(["z", "z"], GREEDY, priority=[0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("prompts", {"prompts": value}) for value in (None, 5, 1.5, {5, 6}, iter(["z"]))),
        *(
            ("sampling_params", {"sampling_params": value})
            for value in ({"temperature": 0}, "z", 5, [None], [{}], SamplingParams, (x for x in ()))
        ),
        *(("priority", {"priority": value}) for value in (5, [None], [1.5], "0", {0})),
    ],
)
def test_argument_of_another_type_is_refused_by_name(letters, name, arguments):
    with pytest.raises(InvalidRequestError, match=f"^{name} ") as caught:
        letters.generate(**{"prompts": ["z"], "use_tqdm": False, **arguments})
    assert caught.value.parameter == name
    assert generate(letters, max_tokens=3).text == "abc"


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [], [[]]])
def test_what_is_no_conversation_is_refused(letters, messages):
    with pytest.raises(InvalidRequestError, match=r"^messages must be a list"):
        letters.chat(messages, GREEDY)


def test_arrays_are_prompts_too(letters):
    ids = letters.get_tokenizer().encode("z")
    for prompts in (np.array(ids), np.array([ids, ids]), range(5, 8), ("z", "z")):
        outputs = letters.generate(prompts, GREEDY, use_tqdm=False)
        expected = [ids] * len(outputs) if not isinstance(prompts, range) else [[5, 6, 7]]
        assert [output.prompt_token_ids for output in outputs] == expected


def test_priority_is_refused_or_obeyed(letters, chain_letters):
    with pytest.raises(InvalidRequestError, match="priority is 1"):
        letters.generate("z", GREEDY, priority=[1])
    with start(chain_letters, scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(["z", "z"], GREEDY, priority=[1, 0], use_tqdm=False)
    late, early = (output.metrics.first_scheduled_time for output in outputs)
    assert early < late


def test_empty_text_is_the_bos_and_empty_ids_are_refused(tiny):
    assert tiny.generate("", GREEDY, use_tqdm=False)[0].prompt_token_ids == [BOS_ID]
    with pytest.raises(InvalidRequestError, match="prompt_token_ids is empty"):
        tiny.generate({"prompt_token_ids": []}, GREEDY)


# Limits


@pytest.fixture(scope="module")
def short(tiny_spm):
    with start(tiny_spm, max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"), list(itertools.product((62, 63, 64, 65), (1, 2, 10, None)))
)
def test_context_limit_is_exact(short, num_prompt_tokens, max_tokens):
    prompt, params = [5] * num_prompt_tokens, {"max_tokens": max_tokens, "ignore_eos": True}
    if num_prompt_tokens >= 64:
        with pytest.raises(InvalidRequestError, match=f"{num_prompt_tokens} tokens.* 64 "):
            generate(short, prompt, **params)
        return
    answer = generate(short, prompt, **params)
    room = 64 - num_prompt_tokens
    assert len(answer.token_ids) == (room if max_tokens is None else min(max_tokens, room))
    assert answer.finish_reason == "length"


def test_prompt_beyond_the_pool_is_refused_and_blocks_nobody(tiny_spm):
    with start(tiny_spm, num_gpu_blocks_override=8, block_size=16, max_model_len=512) as llm:
        with pytest.raises(
            BatchRefusedError, match=r"300 tokens.* 128 .* 8 blocks of 16"
        ) as caught:
            llm.generate([list(range(3, 303)), "hi the a"], GREEDY, use_tqdm=False)
        refused, served = caught.value.outputs
        assert refused is None
        assert served.outputs[0].finished
        answer = generate(llm, [5] * 100, max_tokens=400, ignore_eos=True)
        assert (len(answer.token_ids), answer.finish_reason) == (28, "length")
        assert generate(llm, "hi").finished


def test_engine_is_usable_after_a_refusal(letters):
    for bad in ({"logit_bias": {999: 1.0}}, {"stop_token_ids": [345]}, {"min_tokens": 99}):
        with pytest.raises(InvalidRequestError):
            generate(letters, **bad)
        assert generate(letters, max_tokens=3).text == "abc"


def test_biased_rows_without_a_token_have_no_text(tiny_padded_vocab):
    with start(tiny_padded_vocab) as llm:
        answer = generate(llm, "hi", logit_bias={381: 1000.0}, max_tokens=2)
        assert (answer.token_ids, answer.text) == ([381, 381], "")
        with pytest.raises(InvalidRequestError, match="382"):
            generate(llm, "hi", logit_bias={382: 5.0})


# The engine around it


def test_engine_that_was_shut_down_says_so_and_harms_no_other(letters, chain_letters):
    llm = start(chain_letters)
    assert generate(llm, max_tokens=3).text == "abc"
    for _ in range(2):
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            generate(llm)
    assert generate(letters, max_tokens=3).text == "abc"


def test_cache_is_read_and_can_be_reset(tiny_spm):
    prompt = {"prompt_token_ids": list(range(3, 51))}
    with start(tiny_spm, block_size=16) as llm:

        def num_cached():
            return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

        assert [num_cached() for _ in range(3)] == [0, 32, 32]
        salted = {**prompt, "cache_salt": "a"}
        assert llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert llm.reset_prefix_cache()
        assert num_cached() == 0


def test_answers_share_their_prompt_also_without_a_prefix_cache(tiny_spm):
    prompt = {"prompt_token_ids": list(range(3, 51))}
    params = SamplingParams(n=2, temperature=1, max_tokens=2)
    with start(tiny_spm, block_size=16, enable_prefix_caching=False) as llm:
        for _ in range(2):
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.num_cached_tokens == 0
            assert all(answer.finished for answer in output.outputs)


def test_token_ids_alone_need_no_tokenizer(tiny_spm):
    with start(tiny_spm, skip_tokenizer_init=True, load_format="dummy") as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (3, "")
        with pytest.raises(InvalidRequestError, match="give prompt_token_ids"):
            llm.generate("hi", params)
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.get_tokenizer()
        with pytest.raises(ConfigError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], params)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"generation_config": "some/folder"}, "generation_config is 'some/folder'"),
        ({"chat_template": ""}, "chat_template is ''"),
        ({"chat_template": "missing.jinja"}, "chat_template is 'missing.jinja'"),
        ({"tokenizer": "/nowhere"}, "/nowhere"),
        ({"max_model_len": 1_000}, "max_model_len is 1000"),
        ({"quantization": "awq"}, "quantization is 'awq'"),
    ],
)
def test_impossible_setting_stops_the_start(tiny_spm, settings, text):
    with pytest.raises(ConfigError, match=text):
        start(tiny_spm, **settings)


def test_defaults_that_cannot_be_used_stop_the_start(tiny_spm, tmp_path):
    write_generation_config(tiny_spm, tmp_path / "model", top_p=7.0)
    with pytest.raises(ConfigError, match=r"top_p is 7.0.* generation_config=octavo"):
        start(tmp_path / "model")


def test_models_defaults_are_announced_and_yield_to_explicit_values(tiny_spm, tmp_path, caplog):
    folder = tmp_path / "model"
    write_generation_config(tiny_spm, folder, temperature=0.1, top_k=1, max_new_tokens=5)
    with start(folder) as llm:
        assert "temperature=0.1, top_k=1, max_tokens=5" in caplog.text
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.1, top_k=1, max_tokens=5)
        (by_default,) = llm.generate("hi", use_tqdm=False)
        explicit = SamplingParams(temperature=1.5, seed=3, max_tokens=5)
        (explicit_output,) = llm.generate("hi", explicit, use_tqdm=False)
    assert by_default.outputs[0].token_ids != explicit_output.outputs[0].token_ids
    with start(folder, generation_config="octavo") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
