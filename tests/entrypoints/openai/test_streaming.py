"""The bytes of streams: usage rules, errors inside them, and what is left out."""

import asyncio
import json

import pytest

from octavo.entrypoints.openai.forms import ChatForm, CompletionForm
from octavo.entrypoints.openai.streaming import ChunkWriter, EventStream
from octavo.outputs import CompletionOutput, RequestOutput

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 10},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 10},
}
HEAD = {"id": "x", "model": "m"}


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
        return self.unread.pop(0)

    def close(self):
        self.is_closed = True


def answer_with(stream, writer):
    """Return the body that a client receives that stays to the end."""
    body = []

    async def send(message):
        body.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    asyncio.run(EventStream(stream, writer, {})({}, receive, send))
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


def test_held_back_text_makes_no_chunk():
    writer = ChunkWriter(HEAD, CompletionForm(None), has_usage=False)
    assert writer.write(make_output("")) == b""
    assert read_events(writer.write(make_output("ab")))[0]["choices"][0]["text"] == "ab"


def test_finish_without_text_is_sent():
    writer = ChunkWriter(HEAD, CompletionForm(None), has_usage=False)
    chunk, end = read_events(writer.write(make_output("", finish_reason="stop")))
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert end == "[DONE]"


def test_role_stands_before_the_first_text_and_nowhere_else():
    writer = ChunkWriter(HEAD, ChatForm(None, bytes), has_usage=False)
    first = [event["choices"][0]["delta"] for event in read_events(writer.write(make_output("a")))]
    second = [event["choices"][0]["delta"] for event in read_events(writer.write(make_output("b")))]
    assert first == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert second == [{"content": "b"}]


def test_failed_answer_ends_the_stream_with_an_error_event():
    writer = ChunkWriter(HEAD, ChatForm(None, bytes), has_usage=True)
    failed = make_output("", finish_reason="error", error="non-finite logits")
    event, end = read_events(writer.write(failed))
    assert event["error"]["message"] == "non-finite logits"
    assert (event["error"]["type"], event["error"]["code"]) == ("InternalServerError", 500)
    assert end == "[DONE]"


def test_text_that_comes_with_a_failure_is_sent_before_it():
    writer = ChunkWriter(HEAD, CompletionForm(None), has_usage=False)
    answers = [
        CompletionOutput(0, "a", [5], finish_reason="error", error="late"),
        CompletionOutput(1, "b", [5], finish_reason="error", error="late"),
    ]
    *chunks, error, end = read_events(writer.write(make_outputs(*answers, finished=True)))
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
    writer = ChunkWriter(HEAD, CompletionForm(None), has_usage=has_usage)
    *chunks, error, end = read_events(answer_with(stream, writer))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "x", "b"]
    assert error["error"]["message"] == "non-finite logits"
    assert end == "[DONE]"
    assert (stream.is_closed, stream.unread) == (True, [third])


def test_text_is_escaped():
    text = 'a"\n\\\x00 😀</s>'
    writer = ChunkWriter(HEAD, CompletionForm(None), has_usage=False)
    assert read_events(writer.write(make_output(text)))[0]["choices"][0]["text"] == text
