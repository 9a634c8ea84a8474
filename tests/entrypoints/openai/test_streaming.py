"""The bytes of streams: usage rules, errors inside them, and what is left out."""

import asyncio
import json

import numpy as np
import pytest

from octavo.engine.prompt import EncodedPrompt
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.openai.chunk_writer import ChunkWriter
from octavo.entrypoints.openai.forms import ChatForm, CompletionForm, ReplyShape
from octavo.entrypoints.openai.streaming import EventStream
from octavo.entrypoints.openai.usage import Usage, UsageReports
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from tests.checkpoints import build_tokenizer
from tests.echo_core import EchoCore
from tests.live_server import running_server

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 10},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 10},
}
TOKENIZER = Tokenizer(build_tokenizer())


def create_writer(form=None, *, has_usage=False, reports=UsageReports.NOWHERE, **params):
    form = form or CompletionForm(ReplyShape(), TOKENIZER, [])
    reports = UsageReports.AT_THE_END if has_usage else reports
    head = {"id": "x", "model": "m"}
    return ChunkWriter(head, form, Usage(2), reports=reports, params=SamplingParams(**params))


def create_chat_form():
    return ChatForm(ReplyShape(), TOKENIZER, EncodedPrompt(np.asarray([5], dtype=np.int32)))


def make_output(text="a", *, index=0, finish_reason=None, error=None):
    answer = CompletionOutput(index, text, [5], finish_reason=finish_reason, error=error)
    return RequestOutput("r", "p", [1, 2], [answer], finished=finish_reason is not None)


def make_outputs(*answers, finished=False):
    return RequestOutput("r", "p", [1, 2], list(answers), finished=finished)


class ScriptedStream:
    """Stands in for the stream of a request: gives these outputs and notes that it was closed."""

    def __init__(self, outputs):
        self.is_closed = False
        self.unread = list(outputs)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.unread:
            raise StopAsyncIteration
        return 0, self.unread.pop(0)

    def close(self):
        self.is_closed = True


def answer_with(stream, writer, *, keep_alive_s=60, wait_s=0):
    """Return the body that a client receives that stays to the end, and ``wait_s`` longer."""
    body = []

    async def send(message):
        body.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    async def answer():
        await EventStream(stream, writer, {}, keep_alive_s=keep_alive_s)({}, receive, send)
        await asyncio.sleep(wait_s)

    asyncio.run(answer())
    return b"".join(body)


def read_events(data):
    events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stop": ["b"]}])
def test_requested_usage_is_null_until_the_totals(server, path, extra):
    fields = BODIES[path] | extra
    plain = server.post(path, fields).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.post(path, fields | options).events
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
def test_usage_that_was_not_asked_for_is_not_sent(server, path, options):
    events = server.post(path, BODIES[path] | {"stream": True} | options).events
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_grows_to_the_totals(server, path, n):
    fields = BODIES[path] | {"n": n}
    totals = server.post(path, fields).json["usage"]
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    *chunks, last = server.post(path, fields | options).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == totals["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {totals["prompt_tokens"]}
    assert (last["choices"], last["usage"]) == ([], totals)


def test_continuous_usage_counts_what_has_been_sent():
    reports = UsageReports.IN_EVERY_CHUNK
    writer = create_writer(create_chat_form(), reports=reports)
    events = read_events(writer.write(0, make_output("a")))
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1]


@pytest.mark.parametrize("path", BODIES)
def test_usage_that_is_switched_off_is_not_sent(server, path):
    options = {"include_usage": False, "continuous_usage_stats": True}
    events = server.post(path, BODIES[path] | {"stream": True, "stream_options": options}).events
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_may_collect_tokens_for_a_chunk(path):
    with running_server(EchoCore(step_time_s=0.005)) as server:
        fields = BODIES[path] | {"return_token_ids": True}
        plain = server.post(path, fields).json["choices"][0]["token_ids"]
        body = fields | {"stream": True, "stream_interval": 4}
        events = server.post(path, body).events
    parts = [event["choices"][0].get("token_ids", []) for event in events]
    assert [token_id for part in parts for token_id in part] == plain
    sizes = [len(part) for part in parts if part]
    assert sizes[0] == 1
    assert min(sizes[1:-1]) >= 4


def test_held_back_text_makes_no_chunk():
    writer = create_writer()
    assert writer.write(0, make_output("")) == b""
    assert read_events(writer.write(0, make_output("ab")))[0]["choices"][0]["text"] == "ab"


def test_finish_without_text_is_sent():
    writer = create_writer()
    chunk, end = read_events(writer.write(0, make_output("", finish_reason="stop")))
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert end == "[DONE]"


def test_role_stands_before_the_first_text_and_nowhere_else():
    writer = create_writer(create_chat_form())
    first = [
        event["choices"][0]["delta"] for event in read_events(writer.write(0, make_output("a")))
    ]
    second = [
        event["choices"][0]["delta"] for event in read_events(writer.write(0, make_output("b")))
    ]
    assert first == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert second == [{"content": "b"}]


def test_failed_answer_ends_the_stream_with_an_error_event():
    writer = create_writer(create_chat_form(), has_usage=True)
    failed = make_output("", finish_reason="error", error="non-finite logits")
    event, end = read_events(writer.write(0, failed))
    assert event["error"]["message"] == "non-finite logits"
    assert (event["error"]["type"], event["error"]["code"]) == ("InternalServerError", 500)
    assert end == "[DONE]"


def test_text_that_comes_with_a_failure_is_sent_before_it():
    writer = create_writer(n=2)
    answers = [
        CompletionOutput(0, "a", [5], finish_reason="error", error="late"),
        CompletionOutput(1, "b", [5], finish_reason="error", error="late"),
    ]
    *chunks, error, end = read_events(writer.write(0, make_outputs(*answers, finished=True)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a", None),
        ("b", None),
    ]
    assert error["error"]["message"] == "late"
    assert end == "[DONE]"


FAILED_ANSWER = CompletionOutput(1, "", [5], finish_reason="error", error="non-finite logits")


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_failed_answer_ends_the_stream_of_all_answers_once(has_usage, is_last):
    first = make_outputs(CompletionOutput(0, "a", [5]), CompletionOutput(1, "x", [5]))
    second = make_outputs(CompletionOutput(0, "b", [5]), FAILED_ANSWER, finished=is_last)
    third = make_outputs(CompletionOutput(0, "c", [5], finish_reason="length"), finished=True)
    stream = ScriptedStream([first, second, third])
    writer = create_writer(has_usage=has_usage, n=2)
    *chunks, error, end = read_events(answer_with(stream, writer))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "x", "b"]
    assert error["error"]["message"] == "non-finite logits"
    assert end == "[DONE]"
    assert (stream.is_closed, stream.unread) == (True, [third])


def test_text_is_escaped():
    text = 'a"\n\\\x00 😀</s>'
    writer = create_writer()
    assert read_events(writer.write(0, make_output(text)))[0]["choices"][0]["text"] == text
