import subprocess
import sys

import msgspec
import numpy as np
import pytest

from octavo.engine.messages import unpack_ids
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.request_factory import RequestDefaults, RequestFactory, Submission
from octavo.engine.row_sampling import derive_seed, encode_bad_words
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import EOS_ID, build_tokenizer
from tests.engine.scripted_core import INFO

SPM = Tokenizer(build_tokenizer())
BYTE_LEVEL = Tokenizer(build_byte_level_tokenizer())
DEFAULTS = RequestDefaults(eos_ids=(EOS_ID,))


def create_factory(*, tokenizer=SPM, defaults=DEFAULTS, **info):
    return RequestFactory(tokenizer, msgspec.structs.replace(INFO, **info), defaults)


def submit(factory, *, token_ids=(1, 300), priority=0, cache_salt=None, **params):
    prompt = EncodedPrompt(np.asarray(token_ids, dtype=np.int32), cache_salt=cache_salt)
    (messages,) = factory.create(
        Submission(
            request_id="r",
            keys=["r"],
            prompts=[prompt],
            params=SamplingParams(**params),
            arrival_s=1.0,
            priority=priority,
        )
    )
    return messages


def create_one(**options):
    (message,) = submit(create_factory(), **options)
    return message


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "resolved"),
    [(62, 1, 1), (62, 10, 2), (63, 1, 1), (63, None, 1), (10, None, 54), (10, 54, 54)],
)
def test_output_is_cut_where_the_request_reaches_its_limit(num_prompt_tokens, max_tokens, resolved):
    message = create_one(token_ids=[5] * num_prompt_tokens, max_tokens=max_tokens)
    assert message.max_tokens == resolved


@pytest.mark.parametrize("length", [64, 65])
def test_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(length):
    with pytest.raises(InvalidRequestError, match=rf"prompt has {length} tokens.* 64 ") as caught:
        create_one(token_ids=[5] * length)
    assert caught.value.parameter == "prompt"


def test_prompt_beyond_the_pool_is_refused_with_the_pools_size():
    factory = create_factory(max_tokens_per_request=32, num_blocks=2, max_model_len=64)
    with pytest.raises(InvalidRequestError, match=r"40 tokens.* 32 .* 2 blocks of 16"):
        submit(factory, token_ids=[5] * 40)


@pytest.mark.parametrize(
    ("params", "parameter", "text"),
    [
        ({"token_ids": [1, 345]}, "prompt", "token id 345; .* end at 344"),
        ({"logit_bias": {345: 1.0}}, "logit_bias", "345"),
        ({"allowed_token_ids": [3, 999]}, "allowed_token_ids", "999"),
        ({"stop_token_ids": [400]}, "stop_token_ids", "400"),
        ({"logprobs": 346}, "logprobs", "346"),
        ({"prompt_logprobs": 346}, "prompt_logprobs", "346"),
        ({"priority": 1}, "priority", "fcfs"),
        ({"min_tokens": 1, "allowed_token_ids": [EOS_ID]}, "allowed_token_ids", "min_tokens"),
    ],
)
def test_value_that_this_engine_cannot_serve_is_refused_by_name(params, parameter, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        create_one(**params)
    assert caught.value.parameter == parameter


def test_ids_of_rows_without_a_token_are_served():
    factory = create_factory(vocab_size=382)
    (message,) = submit(factory, token_ids=[381], logit_bias={381: 1.0})
    assert message.sampling.logit_bias == ((381, 1.0),)


def test_stop_strings_are_refused_without_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        submit(create_factory(tokenizer=None), stop="a")


@pytest.mark.parametrize("params", [{"logit_bias": {999: 1.0}}, {"stop": "a"}])
def test_refused_request_takes_no_number(params):
    factory = create_factory(tokenizer=None)
    with pytest.raises(InvalidRequestError):
        submit(factory, **params)
    assert submit(factory)[0].number == 0
    assert submit(factory)[0].number == 1


def test_priority_is_passed_under_its_policy():
    factory = create_factory(scheduling_policy="priority")
    for priority in (-3, -(2**31), 2**31 - 1):
        assert submit(factory, priority=priority)[0].priority == priority


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("priority", [1.0, "1", True, None, float("nan")])
def test_priority_that_is_no_integer_is_refused_by_name(policy, priority):
    with pytest.raises(InvalidRequestError, match=r"^priority is .*integer") as caught:
        submit(create_factory(scheduling_policy=policy), priority=priority)
    assert caught.value.parameter == "priority"


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 2**63, 10**30])
def test_priority_beyond_an_int32_is_refused_by_name(priority):
    factory = create_factory(scheduling_policy="priority")
    with pytest.raises(
        InvalidRequestError, match=f"priority is {priority}; .*2147483647"
    ) as caught:
        submit(factory, priority=priority)
    assert caught.value.parameter == "priority"


def test_message_carries_the_prompt_and_what_ends_the_output():
    message = create_one(token_ids=[1, 300], cache_salt="s", stop_token_ids=[7, 5, 7])
    assert unpack_ids(message.prompt).tolist() == [1, 300]
    assert (message.eos_ids, message.stop_ids) == ((EOS_ID,), (5, 7))
    assert (message.cache_salt, message.request_id, message.arrival_s) == ("s", "r", 1.0)


def test_ignored_end_tokens_are_still_held_back_before_min_tokens():
    message = create_one(ignore_eos=True, min_tokens=4, stop_token_ids=[9])
    assert message.eos_ids == ()
    assert message.sampling.held_back_ids == (EOS_ID, 9)
    assert create_one(stop_token_ids=[9]).sampling.held_back_ids == ()


@pytest.mark.parametrize(
    ("temperature", "resolved"), [(0.0, 0.0), (1e-30, 0.0), (1e-6, 0.0), (1e-4, 1e-2), (0.7, 0.7)]
)
def test_tiny_temperatures_become_greedy_or_representable(temperature, resolved):
    assert create_one(temperature=temperature).sampling.temperature == resolved


def test_switched_off_top_k_has_one_form():
    assert create_one(top_k=-1).sampling.top_k == create_one(top_k=0).sampling.top_k == 0


def test_answers_differ_in_number_and_seed_alone():
    first, second = submit(create_factory(), n=2, seed=42)
    assert (first.number, second.number) == (0, 1)
    assert first.sampling.seed != second.sampling.seed
    sampling = msgspec.structs.replace(second.sampling, seed=first.sampling.seed)
    assert msgspec.structs.replace(second, number=0, sampling=sampling) == first


def test_same_seed_gives_the_same_seeds_whatever_came_before():
    factory = create_factory()
    first = [message.sampling.seed for message in submit(factory, n=3, seed=42)]
    assert first == [message.sampling.seed for message in submit(factory, n=3, seed=42)]
    assert submit(factory, seed=42)[0].sampling.seed == first[0]
    assert len({*first, submit(factory, seed=43)[0].sampling.seed}) == 4


def test_requests_without_a_seed_repeat_with_the_engines_seed():
    def seeds(engine_seed):
        factory = create_factory(defaults=RequestDefaults(seed=engine_seed))
        return [submit(factory)[0].sampling.seed for _ in range(3)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 6


def test_derived_seeds_are_the_same_in_every_process():
    code = "from octavo.engine.row_sampling import derive_seed; print(derive_seed(-7, 2))"
    environment = {"PYTHONHASHSEED": "123"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) == derive_seed(-7, 2)
    assert 0 <= derive_seed(-7, 2) < 2**63


def test_prompt_logprobs_are_asked_of_the_first_answer_alone():
    first, second = submit(create_factory(), n=2, prompt_logprobs=3)
    assert [m.sampling.num_prompt_logprobs for m in (first, second)] == [3, None]
    assert [m.skip_reading_prefix_cache for m in (first, second)] == [True, False]


def test_skipping_the_prefix_cache_holds_for_every_answer():
    messages = submit(create_factory(), n=2, skip_reading_prefix_cache=True)
    assert [message.skip_reading_prefix_cache for message in messages] == [True, True]


def test_answers_share_a_namespace_of_their_own_when_caching_is_off():
    factory = create_factory(defaults=RequestDefaults(enable_prefix_caching=False))
    namespaces = [message.private_namespace for message in submit(factory, n=2)]
    assert namespaces == [0, 0]
    assert submit(factory)[0].private_namespace == 2
    assert create_one().private_namespace is None


@pytest.mark.parametrize("tokenizer", [SPM, BYTE_LEVEL], ids=["spm", "byte-level"])
def test_bad_word_is_spelt_with_and_without_a_space(tokenizer):
    sequences = encode_bad_words([" the"], tokenizer)
    assert sorted(tokenizer.decode([*tokenizer.encode("."), *ids]) for ids in sequences) == [
        ". the",
        ".the",
    ]


def test_bad_word_within_a_text_has_no_space_of_its_own():
    (plain, spaced) = encode_bad_words(["the"], SPM)
    assert SPM.hf_tokenizer.convert_ids_to_tokens(plain) == ["t", "h", "e"]
    assert SPM.hf_tokenizer.convert_ids_to_tokens(spaced) == ["▁the"]


class CountingId(int):
    """A token id that counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        CountingId.num_compared += 1
        return int(self) == int(other)


class CharacterTokenizer:
    """Spells every text in its characters."""

    def encode(self, text, *, add_special_tokens):
        return [CountingId(ord(character)) for character in text]


def test_bad_words_are_encoded_in_linear_time_and_keep_their_order():
    words = [f"{number:04}" for number in range(2000)]
    CountingId.num_compared = 0
    sequences = encode_bad_words([*words, *words], CharacterTokenizer())
    assert CountingId.num_compared < 20 * len(words)
    spelt = ["".join(map(chr, ids)) for ids in sequences]
    assert spelt == [form for word in words for form in (word, f" {word}")]
