"""POST /v1/chat/completions over HTTP; the core repeats the ids of the rendered conversation."""

import json
import time

import pytest

from octavo.entrypoints.openai.chat import ChatCompletionRequest
from octavo.entrypoints.openai.template_pool import TemplatePool
from octavo.entrypoints.server_settings import ServerSettings
from tests.live_server import create_echo_model, running_server

HELLO = [{"role": "user", "content": "hi"}]


def test_answer_has_the_documented_form(server):
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9})
    body = reply.json
    assert reply.status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == " [user]h"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 22  # one BOS: the template's


def test_stream_starts_with_the_role_and_finishes_each_choice_once(server):
    fields = {"messages": HELLO, "max_tokens": 30, "n": 2}
    plain = server.post("/v1/chat/completions", fields).json
    events = server.post("/v1/chat/completions", fields | {"stream": True}).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in range(2):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == plain["choices"][index]["message"]["content"]


def test_without_a_limit_the_answer_fills_the_context(server):
    usage = server.post("/v1/chat/completions", {"messages": HELLO}).json["usage"]
    assert usage["total_tokens"] == 4096


def test_newer_name_of_the_limit_wins(server):
    fields = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 2}
    assert server.post("/v1/chat/completions", fields).json["usage"]["completion_tokens"] == 2


def test_content_parts_are_the_same_prompt_as_a_string(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    replies = [
        server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20}).json
        for messages in (HELLO, parts)
    ]
    assert replies[0]["choices"] == replies[1]["choices"]
    assert replies[0]["usage"] == replies[1]["usage"]


def test_logprobs_list_tokens_with_their_bytes(server):
    fields = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    plain = server.post("/v1/chat/completions", fields).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in plain] == ["<s>", " ", "["]
    assert [entry["bytes"] for entry in plain] == [list(b"<s>"), list(b" "), list(b"[")]
    assert [len(entry["top_logprobs"]) for entry in plain] == [2, 2, 2]

    events = server.post("/v1/chat/completions", fields | {"stream": True}).events
    parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == plain


def test_continued_message_is_not_closed(server):
    messages = [*HELLO, {"role": "assistant", "content": "yes"}]
    lengths = [
        server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields}).json[
            "usage"
        ]["prompt_tokens"]
        for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False})
    ]
    assert lengths[1] < lengths[2] < lengths[0]


def test_last_message_of_the_answers_role_is_echoed(server):
    messages = [*HELLO, {"role": "assistant", "content": "well"}]
    fields = {"messages": messages, "echo": True, "max_tokens": 9}
    for continued, role, echo in (
        ({}, "assistant", "well"),
        ({"continue_final_message": True}, "assistant", "well"),
        ({"messages": HELLO}, "assistant", ""),
        ({"messages": HELLO, "add_generation_prompt": False}, "user", "hi"),
    ):
        body = fields | continued
        plain = server.post("/v1/chat/completions", body | {"echo": False}).json["choices"][0]
        choice = server.post("/v1/chat/completions", body).json["choices"][0]
        assert choice["message"]["role"] == role
        assert choice["message"]["content"] == echo + plain["message"]["content"]
        events = server.post("/v1/chat/completions", body | {"stream": True}).events
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": role, "content": ""}
        assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


def test_echo_of_parts_is_their_text(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields = {"messages": [*HELLO, {"role": "assistant", "content": parts}], "max_tokens": 1}
    body = fields | {"echo": True, "continue_final_message": True}
    reply = server.post("/v1/chat/completions", body)
    assert reply.json["choices"][0]["message"]["content"].startswith("a\nb")


def test_special_tokens_are_added_on_request(server):
    def count(**fields):
        body = {"messages": HELLO, "max_tokens": 1, **fields}
        return server.post("/v1/chat/completions", body).json["usage"]["prompt_tokens"]

    assert count(add_special_tokens=True) == count() + 1


def test_long_conversation_is_cut_on_request(server):
    def post(**fields):
        body = {"messages": [{"role": "user", "content": "a" * 50}], "max_tokens": 5, **fields}
        return server.post("/v1/chat/completions", body | {"return_token_ids": True}).json

    whole = post()["prompt_token_ids"]
    assert post(truncate_prompt_tokens=10)["prompt_token_ids"] == whole[-10:]
    right = post(truncate_prompt_tokens=10, truncation_side="right")
    assert right["prompt_token_ids"] == whole[:10]
    assert post(truncate_prompt_tokens=-1)["prompt_token_ids"] == whole


def test_template_arguments_reach_the_template():
    template = "{{ bos_token }}{{ flavour }}{{ messages[0]['content'] }}"
    with running_server(model=create_echo_model(chat_template=template)) as server:
        fields = {"messages": HELLO, "chat_template_kwargs": {"flavour": "abc"}, "max_tokens": 7}
        body = server.post("/v1/chat/completions", fields).json
    assert body["choices"][0]["message"]["content"] == " abchi"


def test_words_of_the_template_reach_the_client():
    template = "{{ raise_exception('only users may speak') }}"
    with running_server(model=create_echo_model(chat_template=template)) as server:
        reply = server.post("/v1/chat/completions", {"messages": HELLO})
    assert reply.status == 400
    assert "only users may speak" in reply.json["error"]["message"]
    assert reply.json["error"]["reason_code"] == "chat_template_failed"


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"max_tokens": 3}])
def test_defaults_of_the_model_hold_unless_a_request_says_otherwise(fields):
    with running_server(model=create_echo_model(sampling_defaults=fields)) as server:
        default = server.post("/v1/chat/completions", {"messages": HELLO, "n": 2})
        own = {"temperature": 1.0, "max_tokens": 5, "n": 2, "messages": HELLO}
        chosen = server.post("/v1/chat/completions", own)
    if "temperature" in fields:  # greedy answers would be equal: n is refused
        assert default.status == 400
    else:
        assert default.json["usage"]["completion_tokens"] == 6
    assert chosen.json["usage"]["completion_tokens"] == 10


def test_template_of_a_client_needs_a_server_that_trusts_it():
    fields = {"messages": HELLO, "chat_template": "{{ messages[0].content }}!", "max_tokens": 4}
    with running_server(trust_request_chat_template=True) as server:
        body = server.post("/v1/chat/completions", fields | {"return_prompt_text": True}).json
        tokens = server.post("/tokenize", fields).json["tokens"]
        broken = server.post("/v1/chat/completions", fields | {"chat_template": "{% if %}"})
    assert body["prompt_text"] == "hi!"
    assert len(tokens) == body["usage"]["prompt_tokens"]
    assert broken.status == 400
    assert broken.json["error"]["param"] == "chat_template"


def test_template_of_a_client_is_refused_otherwise(server):
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = server.post(path, {"messages": HELLO, "chat_template": "{{ 1 }}"})
        assert reply.status == 400
        assert reply.json["error"]["reason_code"] == "unsupported_parameter"
        assert "--trust-request-chat-template" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("documents", [{"text": "a"}]), ("reasoning_effort", "low")]
)
def test_field_reaches_templates_that_read_it_and_is_refused_by_others(server, name, value):
    fields = {"messages": HELLO, name: value, "max_tokens": 2, "return_prompt_text": True}
    assert server.post("/v1/chat/completions", fields).json["error"]["param"] == name
    template = f"{{{{ {name} | tojson }}}}{{{{ messages[0]['content'] }}}}"
    with running_server(model=create_echo_model(chat_template=template)) as reader:
        reply = reader.post("/v1/chat/completions", fields)
    assert reply.json["prompt_text"] == json.dumps(value) + "hi"


def test_prompt_text_is_shown_once(server):
    fields = {"messages": HELLO, "max_tokens": 3, "return_prompt_text": True, "n": 2}
    plain = server.post("/v1/chat/completions", fields).json["prompt_text"]
    assert plain == "<s>[user]hi\n[assistant]"
    events = server.post("/v1/chat/completions", fields | {"stream": True}).events
    assert [event["prompt_text"] for event in events if "prompt_text" in event] == [plain]
    cut = server.post("/v1/chat/completions", fields | {"truncate_prompt_tokens": 3}).json
    assert plain.endswith(cut["prompt_text"])
    assert 0 < len(cut["prompt_text"]) < len(plain)


def test_defaults_of_the_server_hold_unless_a_request_says_otherwise():
    settings = {
        "default_chat_template_kwargs": {"flavour": "sweet"},
        "response_role": "poet",
        "return_tokens_as_token_ids": True,
        "enable_force_include_usage": True,
    }
    template = "{{ flavour }}{{ messages[0]['content'] }}"
    fields = {"messages": HELLO, "max_tokens": 6, "logprobs": True, "return_prompt_text": True}
    own = {"chat_template_kwargs": {"flavour": "sour"}, "return_tokens_as_token_ids": False}
    with running_server(model=create_echo_model(chat_template=template), **settings) as server:
        plain = server.post("/v1/chat/completions", fields).json
        other = server.post("/v1/chat/completions", fields | own).json
        events = server.post("/v1/chat/completions", fields | {"stream": True}).events
    assert [plain["prompt_text"], other["prompt_text"]] == ["sweethi", "sourhi"]
    assert plain["choices"][0]["message"]["role"] == "poet"
    tokens = [body["choices"][0]["logprobs"]["content"][0]["token"] for body in (plain, other)]
    assert tokens[0].startswith("token_id:")
    assert not tokens[1].startswith("token_id:")
    assert events[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("own", "expected"), [(None, 7), (3, 3)])
def test_stream_interval_of_the_server_is_a_default(own, expected):
    body = ChatCompletionRequest(messages=HELLO, stream_interval=own)
    body.fill_in(ServerSettings(stream_interval=7))
    assert body.to_sampling_params({}).stream_interval == expected


def test_content_has_the_form_that_the_server_was_told():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fields = {"messages": HELLO, "max_tokens": 2, "return_prompt_text": True}
    with running_server(
        model=create_echo_model(chat_template=template), chat_template_content_format="openai"
    ) as server:
        body = server.post("/v1/chat/completions", fields).json
    assert body["prompt_text"] == "[{'type': 'text', 'text': 'hi'}]"


def test_endless_template_is_the_clients_error_and_holds_up_nobody():
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = {"messages": HELLO, "chat_template": template}
    with running_server(
        trust_request_chat_template=True, templates=TemplatePool(time_limit_s=0.8)
    ) as server:
        collect = server.start_posts("/v1/chat/completions", endless, endless | {"stream": True})
        longest = 0.0
        while server.service.templates.pids or not longest:
            start = time.monotonic()
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
            longest = max(longest, time.monotonic() - start)
        replies = collect()
        assert server.post("/v1/chat/completions", {"messages": HELLO}).status == 200
    assert longest < 0.8  # nobody waited for the template
    assert [reply.status for reply in replies] == [400, 400]
    assert {reply.json["error"]["reason_code"] for reply in replies} == {"chat_template_too_slow"}
