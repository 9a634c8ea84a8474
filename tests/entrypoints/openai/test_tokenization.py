"""POST /tokenize and /detokenize over HTTP: what the engine's own prompts become, and back."""

import json
import threading
import time

import pytest

from octavo.entrypoints.openai import tokenization
from tests.live_server import create_echo_model, running_checkpoint, running_server

MESSAGES = [{"role": "user", "content": "hi"}]
TEXTS = ["", "hi", "a b  c\n\n", "😀 é 公司", "x" * 5_000, "\u0000\u200b"]
NAMES = {"count", "max_model_len", "tokens", "token_strs"}


@pytest.fixture(scope="module")
def tiny(tiny_spm):
    with running_checkpoint(tiny_spm, max_model_len=128) as live:
        yield live


def tokenize(server, **body):
    reply = server.post("/tokenize", body)
    assert reply.status == 200, reply.data
    return reply.json


def detokenize(server, tokens):
    reply = server.post("/detokenize", {"tokens": tokens})
    assert reply.status == 200, reply.data
    assert set(reply.json) == {"prompt"}
    return reply.json["prompt"]


def count_prompt(server, path, body):
    usage = server.post(path, body | {"max_tokens": 1}).json["usage"]
    return usage["prompt_tokens"]


def test_a_prompt_has_the_tokens_that_a_completion_would_have(tiny):
    answer = tokenize(tiny, prompt="hi")
    assert answer == {
        "count": 4,
        "max_model_len": 128,
        "tokens": [1, 259, 267, 268],
        "token_strs": None,
    }
    assert count_prompt(tiny, "/v1/completions", {"prompt": "hi"}) == 4


def test_a_conversation_has_the_tokens_that_a_chat_would_have(tiny):
    answer = tokenize(tiny, messages=MESSAGES)
    assert answer["count"] == len(answer["tokens"]) == 22
    assert answer["tokens"][:2] == [1, 259]
    assert count_prompt(tiny, "/v1/chat/completions", {"messages": MESSAGES}) == 22


def test_special_tokens_are_added_to_prompts_and_not_to_conversations_unless_asked(tiny):
    bare = tokenize(tiny, prompt="hi", add_special_tokens=False)["tokens"]
    assert tokenize(tiny, prompt="hi", add_special_tokens=True)["tokens"] == [1, *bare]
    chat = tokenize(tiny, messages=MESSAGES)["tokens"]
    assert tokenize(tiny, messages=MESSAGES, add_special_tokens=False)["tokens"] == chat
    assert tokenize(tiny, messages=MESSAGES, add_special_tokens=True)["tokens"] == [1, *chat]


def test_tokens_are_named_on_request(tiny):
    answer = tokenize(tiny, prompt="hi", return_token_strs=True)
    assert answer["token_strs"][0] == "<s>"
    assert len(answer["token_strs"]) == answer["count"]
    assert tokenize(tiny, messages=MESSAGES, return_token_strs=True)["token_strs"][0] == "<s>"
    assert tokenize(tiny, prompt="", add_special_tokens=False, return_token_strs=True) == {
        "count": 0,
        "max_model_len": 128,
        "tokens": [],
        "token_strs": [],
    }


TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}{{ mood }}"
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[hi]answer:"),
        ({"add_generation_prompt": False}, "[hi]"),
        ({"continue_final_message": True}, "[hi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[hi"),
        ({"chat_template_kwargs": {"mood": "sad"}}, "[hi]answer:sad"),
    ],
)
def test_a_conversation_is_rendered_as_asked(fields, text):
    with running_server(model=create_echo_model(chat_template=TEMPLATE)) as server:
        answer = tokenize(server, messages=MESSAGES, **fields)
        assert detokenize(server, answer["tokens"]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(server, text):
    answer = tokenize(server, prompt=text, add_special_tokens=False)
    assert set(answer) == NAMES
    assert detokenize(server, answer["tokens"]) == text


def test_special_tokens_are_part_of_the_text(tiny):
    assert detokenize(tiny, tokenize(tiny, prompt="hi")["tokens"]) == "<s> hi"


def test_every_id_of_the_model_has_a_text_and_no_other(tiny_padded_vocab):
    with running_checkpoint(tiny_padded_vocab) as server:
        assert detokenize(server, [381]) == ""
        everything = detokenize(server, list(range(382)))
        assert everything
        for outside in (382, -1, -(2**31), 2**31, 2**63, 10**4_000):
            reply = server.post("/detokenize", {"tokens": [5, outside]})
            assert reply.status == 400
            error = reply.json["error"]
            assert error["param"] == "tokens"
            assert str(outside)[:20] in error["message"]
            assert "from 0 to 381" in error["message"]


@pytest.mark.parametrize(
    "tokens", [[1.5], ["5"], [True], [None], [[5]], "5", 5, None, {}, [5, "a"] * 1_000]
)
def test_what_is_no_list_of_ids_is_refused(server, tokens):
    reply = server.post("/detokenize", {"tokens": tokens})
    assert (reply.status, reply.json["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
        ),
        (
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
    ],
)
def test_what_cannot_be_tokenized_is_named(server, body, parameter):
    reply = server.post("/tokenize", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, parameter)


def test_fields_that_change_nothing_are_accepted(server):
    nulls = dict.fromkeys(tokenization.TokenizeRequest.model_fields)
    neutral = {"add_generation_prompt": True, "continue_final_message": False}
    neutral |= {"chat_template_kwargs": {}, "chat_template": None, "tools": []}
    expected = tokenize(server, prompt="hi")
    for fields in (nulls, neutral, {"return_token_strs": False}):
        assert tokenize(server, **fields | {"prompt": "hi"}) == expected


def test_unknown_fields_are_accepted_and_named(server):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        reply = server.post(path, body | {"zebra": 1})
        assert reply.status == 200
        assert reply.headers["x-octavo-ignored-fields"] == "zebra"


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
def test_models_are_chosen_as_for_completions(server, path, body, monkeypatch):
    assert server.post(path, body | {"model": "alias"}).status == 200
    assert server.post(path, body | {"model": "other"}).status == 404
    monkeypatch.setattr(server.service, "is_draining", True)
    assert server.post(path, body).status == 503


def test_an_engine_without_a_tokenizer_says_so(tiny_spm):
    with running_checkpoint(tiny_spm, skip_tokenizer_init=True) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            reply = server.post(path, body)
            assert reply.status == 400
            assert "without a tokenizer" in reply.json["error"]["message"]


def test_a_model_without_a_template_tokenizes_prompts(tiny_no_template):
    with running_checkpoint(tiny_no_template) as server:
        assert tokenize(server, prompt="hi")["count"] == 4
        reply = server.post("/tokenize", {"messages": MESSAGES})
        assert "has no chat template" in reply.json["error"]["message"]


def test_texts_longer_than_any_prompt_are_tokenized_up_to_a_limit(server, monkeypatch):
    assert tokenize(server, prompt="ab " * 20_000)["count"] > 4_096
    monkeypatch.setattr(tokenization, "CHARACTERS_PER_TOKEN", 1)
    monkeypatch.setattr(tokenization, "MIN_TEXT_LIMIT", 5_000)
    with running_server() as short:
        assert tokenize(short, prompt="x" * 5_000)["count"]
        long = [{"role": "user", "content": "x" * 5_000}]
        for body in ({"prompt": "x" * 5_001}, {"messages": long}):
            reply = short.post("/tokenize", body)
            assert (reply.status, reply.json["error"]["param"]) == (400, next(iter(body)))
            assert "at most 5000" in reply.json["error"]["message"]


def test_a_huge_list_is_refused_before_it_is_read(server):
    body = b'{"tokens": [' + b"1," * 2**24 + b"1]}"
    assert server.post("/detokenize", body).status == 413


def test_long_texts_hold_nobody_up(server):
    text = json.dumps({"prompt": "The quick brown fox 123. " * 20_000}).encode()
    ids = json.dumps({"tokens": [100] * 500_000}).encode()
    replies = []
    work = [("/tokenize", text), ("/detokenize", ids)] * 2
    threads = [
        threading.Thread(target=lambda path, data: replies.append(server.post(path, data)), args=w)
        for w in work
    ]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        started = time.monotonic()
        assert server.get("/health").status == 200
        slowest = max(slowest, time.monotonic() - started)
    assert [reply.status for reply in replies] == [200] * 4
    assert slowest < 1.5  # all of it takes several seconds


def test_broken_bodies_are_the_clients_error(server):
    for data in (b"", b"[]", b'{"prompt": "\\ud800"}', b'{"tokens": [1', b'{"tokens": [1e400]}'):
        for path in ("/tokenize", "/detokenize"):
            assert server.post(path, data).status == 400
    headers = {"content-type": "text/plain"}
    assert server.request("POST", "/tokenize", b'{"prompt": "a"}', headers).status == 415
