"""Requests that cannot be served: a 4xx in OpenAI's form, streamed or not; the server lives on."""

import json

import pytest

from octavo.entrypoints.http.errors import MAX_MESSAGE_LENGTH
from octavo.entrypoints.http.reasons import STATUS_OF_REASON
from octavo.entrypoints.http.request_body import MAX_BODY_BYTES
from octavo.entrypoints.openai.fields import MAX_JSON_DEPTH

COMPLETION = {"prompt": "ab", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]

BAD_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"n": 1_000_000}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 2.5}, "n"),
    ({"n": "3"}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [["a"]]}, "stop"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"priority": 3}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream_options": {"include_usage": 1}}, "stream_options"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"echo": 1}, "echo"),
    ({"model": "other"}, "model"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_regex": "a+"}, "guided_regex"),
]
BAD_CHAT_FIELDS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
]
BAD_COMPLETION_FIELDS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ["b"]]}, "prompt"),
    ({"prompt": ["a", "b" * 10**6]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": [[5], [345]]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 11}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt_token_ids"),
    ({"prompt": [2**40]}, "prompt_token_ids"),
    ({"prompt": [345]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5] * 4096}, "prompt"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
]
BAD_BODIES = [
    b"",
    b'{"model":',
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"n": ' + b"9" * 5_000 + b"}",
]
LONG = "x" * 100_000
LONG_TEXTS = [
    ("/v1/completions", {"prompt": "a", "model": LONG}, "served here: tiny, alias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {LONG: "1"}}, "valid number"),
    ("/v1/completions", {"prompt": "a", "request_id": LONG}, "at most 256 characters"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}, "text"),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": LONG}, "'max'"),
    ("/tokenize", {"prompt": "a", "model": LONG}, "served here: tiny, alias"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"stop": LONG}}, "4096"),
]
NOT_FINITE = [
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
]


def check_error(reply, status, parameter=None):
    assert reply.status == status, reply.data
    assert reply.headers["content-type"] == "application/json"
    error = reply.json["error"]
    assert set(reply.json) == {"error"}
    assert set(error) == {"message", "type", "param", "code", "reason_code"}
    assert error["code"] == STATUS_OF_REASON[error["reason_code"]] == status
    assert error["param"] == parameter
    assert error["message"]


def check_alive(server):
    assert server.get("/health").status == 200
    assert server.post("/v1/completions", COMPLETION | {"max_tokens": 1}).status == 200
    assert server.service.engine.num_open_requests == 0


def check_both_modes(server, path, body, parameter):
    status = 404 if parameter == "model" else 400
    plain = server.post(path, body | ({"stream": False} if "stream_options" not in body else {}))
    streamed = server.post(path, body | {"stream": True})
    check_error(streamed, status, parameter)
    check_error(plain, status, parameter)
    if "stream_options" not in body:
        assert plain.data == streamed.data


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_bad_fields_of_both_endpoints_are_named(server, path, body):
    for fields, parameter in BAD_FIELDS:
        check_both_modes(server, path, body | fields, parameter)
    check_alive(server)


def test_bad_fields_of_chat_are_named(server):
    for fields, parameter in BAD_CHAT_FIELDS:
        check_both_modes(server, "/v1/chat/completions", CHAT | fields, parameter)
    check_error(server.post("/v1/chat/completions", {}), 400, "messages")
    check_alive(server)


def test_bad_fields_of_completions_are_named(server):
    for fields, parameter in BAD_COMPLETION_FIELDS:
        check_both_modes(server, "/v1/completions", COMPLETION | fields, parameter)
    check_alive(server)


def test_kinds_of_refusals_have_names_of_their_own(server):
    reasons = {
        "prompt_too_long": {"prompt": [5] * 4096},
        "unsupported_parameter": {"use_beam_search": True},
        "invalid_value": {"temperature": -1},
        "model_not_found": {"model": "other"},
    }
    for reason_code, fields in reasons.items():
        reply = server.post("/v1/completions", COMPLETION | fields)
        assert reply.json["error"]["reason_code"] == reason_code
    assert server.post("/v1/completions", b"{").json["error"]["reason_code"] == "invalid_json"
    assert server.get("/v1/nothing").json["error"]["reason_code"] == "not_found"


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_stream_options_without_a_stream_are_refused(server, path, body):
    reply = server.post(path, body | {"stream_options": {"include_usage": True}})
    check_error(reply, 400, "stream_options")


@pytest.mark.parametrize("path", [path for path, _ in ENDPOINTS])
def test_broken_bodies_are_the_clients_error(server, path):
    for body in [*BAD_BODIES, *NOT_FINITE]:
        reply = server.post(path, body)
        assert reply.status == 400, body[:40]
        check_error(reply, 400, reply.json["error"]["param"])
    check_alive(server)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_only_plain_json_is_read(server, headers):
    for path, _ in ENDPOINTS:
        check_error(server.request("POST", path, b'{"prompt":"a"}', headers), 415)


@pytest.mark.parametrize(("path", "body", "reason"), LONG_TEXTS)
def test_a_refusal_does_not_repeat_what_is_long(path, body, reason, server):
    reply = server.post(path, body)
    message = reply.json["error"]["message"]
    assert reply.status in (400, 404)
    assert len(message) <= MAX_MESSAGE_LENGTH
    assert reason in message


def test_charset_and_other_json_types_are_accepted(server):
    for content_type in ("application/json; charset=utf-8", "application/vnd.api+json"):
        headers = {"content-type": content_type}
        data = b'{"prompt":"a","max_tokens":1}'
        assert server.request("POST", "/v1/completions", data, headers).status == 200
    assert server.post("/v1/completions", data, {"content-encoding": "identity"}).status == 200


def test_huge_body_is_refused_before_it_is_parsed(server):
    check_error(server.post("/v1/completions", b" " * (MAX_BODY_BYTES + 1)), 413)


def test_nesting_is_limited(server):
    def nest(depth):
        return COMPLETION | {"unread": json.loads("[" * depth + "]" * depth)}

    assert server.post("/v1/completions", nest(MAX_JSON_DEPTH - 1)).status == 200
    reply = server.post("/v1/completions", nest(MAX_JSON_DEPTH))
    check_error(reply, 400)
    assert "recursion limit" in reply.json["error"]["message"]


def test_null_is_the_same_as_leaving_a_field_out(server):
    properties = server.get("/openapi.json").json["paths"]
    for path, body in ENDPOINTS:
        content = properties[path]["post"]["requestBody"]["content"]
        names = content["application/json"]["schema"]["properties"]
        nulls = {name: None for name in names if name not in body}
        assert server.post(path, nulls | body).status == 200


def test_unknown_fields_are_accepted_and_named(server):
    fields = {"zebra": 1, "weird\r\nname: x": {"a": []}}
    for stream in (False, True):
        reply = server.post("/v1/completions", COMPLETION | fields | {"stream": stream})
        assert reply.status == 200
        assert reply.headers["x-octavo-ignored-fields"] == "zebra,weird%0D%0Aname%3A%20x"
    assert server.post("/v1/completions", COMPLETION).headers["x-octavo-ignored-fields"] is None


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_unsupported_fields_are_accepted_where_they_change_nothing(server, path, body):
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "echo": False, "user": "me"}
    reply = server.post(path, body | neutral | {"response_format": {"type": "text"}})
    assert reply.status == 200
    assert reply.headers["x-octavo-ignored-fields"] is None


def test_unknown_route_and_wrong_method_answer_in_json(server):
    check_error(server.get("/v1/nothing"), 404)
    check_error(server.get("/v1/completions"), 405)
    check_error(server.post("/health", {}), 405)


def test_every_post_route_survives_every_broken_body(server):
    for path, methods in server.get("/openapi.json").json["paths"].items():
        if "requestBody" in methods.get("post", {}):
            statuses = {server.post(path, body).status for body in BAD_BODIES}
            assert statuses == {400}
    check_alive(server)
