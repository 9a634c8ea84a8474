"""The official ``openai`` client against a live server."""

from functools import partial

import openai
import pytest

from tests.echo_core import EchoCore
from tests.live_server import TIMEOUT_S, running_checkpoint, running_server

HELLO = [{"role": "user", "content": "z"}]


@pytest.fixture(scope="module")
def live(chain_letters):
    with running_checkpoint(chain_letters) as server:
        yield server


@pytest.fixture(scope="module")
def client(live):
    with connect(live) as client:
        yield client


def connect(server, *, api_key="none"):
    options = {"api_key": api_key, "timeout": TIMEOUT_S, "max_retries": 0}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]


def test_a_model_is_retrieved_by_its_name(client):
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("somebody/else")


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt="z", temperature=0, max_tokens=20)
    assert answer.choices[0].text == "abcdefghij"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_completion_with_logprobs(client):
    stream = client.completions.create(
        model="tiny", prompt="z", temperature=0, max_tokens=3, stream=True, logprobs=1
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == "abc"
    assert [token for choice in choices for token in choice.logprobs.tokens] == ["a", "b", "c"]


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=4, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    for choice in answer.choices:
        assert choice.message.tool_calls is None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_streamed_chat_with_usage(client):
    stream = client.chat.completions.create(
        model="alias",
        messages=HELLO,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.model for chunk in chunks} == {"alias"}
    assert (last.choices, last.usage.completion_tokens) == ([], 4)


def test_the_clients_streaming_helper_understands_the_events(client):
    end_at_once = {"logit_bias": {"2": 100}}
    with client.chat.completions.stream(model="tiny", messages=HELLO, **end_at_once) as stream:
        (choice,) = stream.get_final_completion().choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(client, stream):
    completions, chat = client.completions, client.chat.completions
    with pytest.raises(openai.BadRequestError) as refused:
        completions.create(model="tiny", prompt="z", temperature=-1, stream=stream)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        completions.create(model="other", prompt="z", stream=stream)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        chat.create(model="tiny", messages=HELLO, tools=tools, stream=stream)


def test_a_dying_engine_is_the_clients_exception():
    with running_server(EchoCore(step_time_s=0.002)) as server, connect(server) as client:
        ask = partial(client.completions.create, model="tiny", prompt="z", max_tokens=4_000)
        stream = ask(stream=True)
        next(stream)
        server.kill_core()
        with pytest.raises(openai.APIError, match="crash on demand"):
            list(stream)
        for is_streamed in (False, True):
            with pytest.raises(openai.InternalServerError, match="the engine has died"):
                ask(stream=is_streamed)


def test_characters_of_several_tokens_come_whole(chain_emoji):
    with running_checkpoint(chain_emoji) as server, connect(server) as client:
        ask = partial(client.completions.create, model="tiny", prompt="z", temperature=0)
        texts = [chunk.choices[0].text for chunk in ask(max_tokens=20, stream=True)]
        assert "".join(texts) == ask(max_tokens=20).choices[0].text == "😀    b"
        assert not any("\ufffd" in text for text in texts)


def test_leaving_a_stream_aborts_the_request(client, live):
    before = live.metric("vllm:request_success_total")
    stream = client.completions.create(
        model="tiny", prompt="z", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    live.wait_for_metric("vllm:request_success_total", before + 1)
    assert live.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"n": 1_000_000}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_refused_chats_are_the_clients_exceptions(client, stream, fields, parameter):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **{"model": "tiny", "messages": HELLO, "stream": stream} | fields
        )
    assert (refused.value.status_code, refused.value.param) == (400, parameter)


def test_parts_and_further_fields_reach_the_server(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "z"}]}]
    extra = {"return_token_ids": True, "return_prompt_text": True, "top_k": 1, "wish": 1}
    answers = [
        client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=4, extra_body=extra
        )
        for messages in (HELLO, parts)
    ]
    assert answers[0].headers["x-octavo-ignored-fields"] == "wish"
    first, second = (answer.parse() for answer in answers)
    assert first.prompt_text == second.prompt_text
    assert first.choices[0].token_ids == second.choices[0].token_ids


def test_wrong_key_is_the_clients_exception():
    with running_server(api_key=["right"]) as server:
        with connect(server, api_key="right") as client:
            assert client.models.list().data
        wrong, refusal = connect(server, api_key="wrong"), openai.AuthenticationError
        with wrong as client, pytest.raises(refusal) as refused:
            client.completions.create(model="tiny", prompt="abcdef", max_tokens=1)
    assert refused.value.body["reason_code"] == "unauthorized"
