"""Token ids in and out, and the routes that render requests into them."""

import pytest

from tests.live_server import create_echo_model, running_server

HELLO = [{"role": "user", "content": "hi"}]
GENERATE = "/inference/v1/generate"
BODIES = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/completions", {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}),
    ("/v1/completions", {"prompt": "abc", "n": 2, "stop": ["c"], "cache_salt": "s"}),
    ("/v1/completions", {"prompt": "abc", "logprobs": 2, "logit_bias": {"7": 1.5}}),
    ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1, "bad_words": ["q"]}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": None, "stop_token_ids": [9]}),
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
]


def render(server, path, body):
    reply = server.post(f"{path}/render", body)
    assert reply.status == 200, reply.data
    return reply.json


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_what_is_rendered_generates_the_same(server, path, body):
    body = {"max_tokens": 6, **body, "seed": 3, "return_token_ids": True}
    direct = server.post(path, body).json
    rendered = render(server, path, body)
    if path == "/v1/completions":
        (rendered,) = rendered
    prompt_ids = direct.get("prompt_token_ids") or direct["choices"][0]["prompt_token_ids"]
    assert rendered["token_ids"] == prompt_ids
    answer = server.post(GENERATE, rendered).json
    for choice, other in zip(answer["choices"], direct["choices"], strict=True):
        assert choice["token_ids"] == other["token_ids"]
        assert choice["finish_reason"] == other["finish_reason"]
        assert choice["stop_reason"] == other["stop_reason"]
        assert (choice["logprobs"] is None) == (other["logprobs"] is None)
    assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    assert ("prompt_logprobs" in answer) == ("prompt_logprobs" in body)


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}])
def test_stream_has_the_same_tokens(server, fields):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "n": 2, "seed": 1}}
    plain = server.post(GENERATE, body).json
    events = server.post(GENERATE, body | {"stream": True} | fields).events
    assert ("usage" in events[-1]) is bool(fields)
    for index, whole in enumerate(plain["choices"]):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


def test_id_of_the_client_is_that_of_the_request(server):
    body = {"token_ids": [5], "sampling_params": {}, "request_id": "mine"}
    assert server.post(GENERATE, body).json["request_id"] == "mine"
    ids = [
        entry["request_id"]
        for entry in render(server, "/v1/completions", {"prompt": ["a", "b"], "request_id": "mine"})
    ]
    assert ids == ["cmpl-mine-0", "cmpl-mine-1"]
    assert (
        render(server, "/v1/chat/completions", {"messages": HELLO, "request_id": "x"})["request_id"]
        == "chatcmpl-x"
    )


def test_defaults_of_the_model_are_rendered():
    with running_server(model=create_echo_model(sampling_defaults={"temperature": 0.0})) as server:
        (own,) = render(server, "/v1/completions", {"prompt": "a"})
        (other,) = render(server, "/v1/completions", {"prompt": "a", "temperature": 1.0})
    assert own["sampling_params"]["temperature"] == 0.0
    assert other["sampling_params"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"token_ids": [345]}, "prompt"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": "2"}}, "n"),
        ({"sampling_params": {"stream": True}}, "sampling_params"),
        ({"sampling_params": {"prompt": "a"}}, "sampling_params"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"sampling_params": None}, "sampling_params"),
        ({"features": {"a": 1}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_impossible_requests_are_refused_by_name(server, body, parameter):
    for stream in (False, True):
        whole = {"token_ids": [5], "sampling_params": {}, "stream": stream} | body
        reply = server.post(GENERATE, whole)
        assert (reply.status, reply.json["error"]["param"]) == (400, parameter)


def test_unknown_fields_are_named_and_change_nothing(server):
    body = {"token_ids": [5], "sampling_params": {"output_kind": 2}, "n": 3, "wish": 1}
    reply = server.post(GENERATE, body)
    assert len(reply.json["choices"]) == 1
    assert set(reply.headers["x-octavo-ignored-fields"].split(",")) == {"output_kind", "n", "wish"}


def test_rendering_runs_nothing(server):
    before = server.metric("vllm:prompt_tokens_total")
    render(server, "/v1/chat/completions", {"messages": HELLO})
    assert server.metric("vllm:prompt_tokens_total") == before
    assert server.post("/v1/completions/render", {"prompt": ""}).status == 200  # BOS
    assert server.post("/v1/completions/render", {"prompt": []}).status == 400
    assert server.post("/v1/completions/render", {"prompt": "a", "timeout": 0}).status == 400
    assert server.post("/v1/completions/render", {"model": "x", "prompt": "a"}).status == 404
