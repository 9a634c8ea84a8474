"""Whole engines on tiny checkpoints whose outputs are known, over HTTP."""

import pytest

from tests.live_server import running_checkpoint

GREEDY = {"prompt": "z", "temperature": 0, "max_tokens": 50}


@pytest.fixture(scope="module")
def tiny(tiny_spm):
    with running_checkpoint(tiny_spm) as server:
        yield server


@pytest.fixture(scope="module")
def short(tiny_spm):
    with running_checkpoint(tiny_spm, max_model_len=64) as server:
        yield server


@pytest.fixture(scope="module")
def letters(chain_letters):
    with running_checkpoint(chain_letters) as server:
        yield server


def complete(server, **fields):
    """Return (text, finish_reason, stop_reason), which must be the same streamed and whole."""
    (choice,) = server.post("/v1/completions", GREEDY | fields).json["choices"]
    events = server.post("/v1/completions", GREEDY | fields | {"stream": True}).events
    last = events[-1]["choices"][0]
    whole = choice["text"], choice["finish_reason"], choice["stop_reason"]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert (text, last["finish_reason"], last["stop_reason"]) == whole
    return whole


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("abcdefghij", "stop", None)),
        ({"stop": ["def"]}, ("abc", "stop", "def")),
        ({"stop": "def", "include_stop_str_in_output": True}, ("abcdef", "stop", "def")),
        ({"stop": ["dex"]}, ("abcdefghij", "stop", None)),
        ({"stop": ["ij", "cd"]}, ("ab", "stop", "cd")),
        ({"stop": ["ef"], "max_tokens": 5}, ("abcde", "length", None)),
        ({"stop": ["z"]}, ("abcdefghij", "stop", None)),
        ({"max_tokens": 3}, ("abc", "length", None)),
    ],
)
def test_stop_strings_cut_the_text_and_are_never_sent(letters, fields, expected):
    assert complete(letters, **fields) == expected


def test_stop_token_is_named(letters):
    token_id = letters.service.model.tokenizer.hf_tokenizer.convert_tokens_to_ids("d")
    text, reason, stop_reason = complete(letters, stop_token_ids=[token_id])
    assert (text, reason, stop_reason) == ("abc", "stop", token_id)


def test_characters_of_several_tokens_are_sent_whole(chain_emoji):
    with running_checkpoint(chain_emoji) as server:
        events = server.post("/v1/completions", GREEDY | {"stream": True}).events
        assert complete(server) == ("😀    b", "stop", None)
    assert "\ufffd" not in "".join(event["choices"][0]["text"] for event in events)


def test_half_a_character_at_the_end_is_the_same_in_both_modes(chain_halfchar):
    with running_checkpoint(chain_halfchar) as server:
        assert complete(server) == ("a\ufffd", "stop", None)


def test_a_prompt_has_one_bos(tiny):
    messages = [{"role": "user", "content": "hi"}]
    chat = tiny.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json
    plain = tiny.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).json
    assert chat["usage"]["prompt_tokens"] == 22
    assert plain["usage"]["prompt_tokens"] == 4


def test_prompt_that_was_seen_before_is_counted_as_cached(tiny):
    fields = {"prompt": "some words that are longer than one block of tokens", "max_tokens": 1}
    first, second = (tiny.post("/v1/completions", fields).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["prompt_tokens"] - 1) // 16 * 16 > 0
    assert tiny.metric("vllm:prefix_cache_hits_total") >= cached


def test_empty_text_is_a_prompt_where_there_is_a_bos(tiny):
    for prompt in ("", [""]):
        reply = tiny.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert (reply.status, reply.json["usage"]["prompt_tokens"]) == (200, 1)
    for prompt in ([], [[]]):
        assert tiny.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status == 400
    chat = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    assert tiny.post("/v1/chat/completions", chat).status == 200


@pytest.mark.parametrize("num_prompt_tokens", [62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 2, 10, None])
def test_nothing_is_off_by_one_at_the_context_limit(short, num_prompt_tokens, max_tokens):
    body = {"prompt": [5] * num_prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    reply = short.post("/v1/completions", body)
    if num_prompt_tokens >= 64:
        assert reply.status == 400
        message = reply.json["error"]["message"]
        assert str(num_prompt_tokens) in message
        assert "64" in message
        return
    usage = reply.json["usage"]
    assert usage["total_tokens"] == min(64, num_prompt_tokens + (max_tokens or 64))
    assert reply.json["choices"][0]["finish_reason"] == "length"


def test_chat_fills_the_context_by_default(short):
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "ignore_eos": True}
    assert short.post("/v1/chat/completions", body).json["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1, "temperature": 1},
        {"top_p": 0.01, "temperature": 1},
        {"logit_bias": {"5": -100}},
        {"allowed_token_ids": [5, 6]},
    ],
)
def test_logprobs_are_always_json(tiny, fields):
    body = {"prompt": "correct horse", "logprobs": 20, "max_tokens": 4, **fields}
    plain = tiny.post("/v1/completions", body)
    streamed = tiny.post("/v1/completions", body | {"stream": True})
    assert len(plain.json["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert streamed.events
    messages = [{"role": "user", "content": "correct horse"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 20, "max_tokens": 4, **fields}
    content = tiny.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * len(content)


def test_token_ids_end_where_the_models_vocabulary_does(tiny_padded_vocab):
    with running_checkpoint(tiny_padded_vocab) as server:
        body = GREEDY | {"max_tokens": 3}
        undisturbed = server.post("/v1/completions", body).json["choices"]
        padding = server.post("/v1/completions", body | {"logit_bias": {"381": 5}})
        outside = server.post("/v1/completions", body | {"logit_bias": {"382": 5}})
        assert (padding.status, outside.status) == (200, 400)
        assert "382" in outside.json["error"]["message"]
        assert server.post("/v1/completions", body).json["choices"] == undisturbed


def test_model_without_a_template_completes_but_does_not_chat(tiny_no_template):
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    with running_checkpoint(tiny_no_template) as server:
        refused = server.post("/v1/chat/completions", messages)
        assert server.post("/v1/completions", {"prompt": "hi"}).status == 200
    assert refused.status == 400
    assert "has no chat template" in refused.json["error"]["message"]


def test_answers_beside_each_other_are_those_of_one_alone(letters):
    alone = complete(letters)
    body = {"prompt": "z", "n": 3, "temperature": 0.01, "max_tokens": 50}
    choices = letters.post("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == [alone[0]] * 3
