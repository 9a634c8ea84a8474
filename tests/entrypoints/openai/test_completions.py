"""POST /v1/completions over HTTP; the core repeats the ids of the prompt."""

import pytest

PROMPT = [100, 101, 102]


def join(events):
    """Join a stream's chunks: index -> (text, finish_reason)."""
    texts, reasons = {}, {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            assert index not in reasons, "a chunk after the finish"
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in sorted(texts.items())}


def test_answer_has_the_documented_form(server):
    reply = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 3})
    body = reply.json
    assert reply.status == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "text": " ab",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 6,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_joins_to_the_plain_answer(server):
    fields = {"prompt": "abc", "max_tokens": 20, "n": 2}
    plain = server.post("/v1/completions", fields).json
    events = server.post("/v1/completions", fields | {"stream": True}).events
    expected = {c["index"]: (c["text"], c["finish_reason"]) for c in plain["choices"]}
    assert join(events) == expected


def test_default_is_sixteen_tokens_and_null_is_as_many_as_fit(server):
    def count(**fields):
        body = server.post("/v1/completions", {"prompt": PROMPT, **fields}).json
        return body["usage"]["completion_tokens"]

    assert count() == 16
    assert count(max_tokens=None) == 4096 - len(PROMPT)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [1, 322, 260], [[1, 322, 260]]])
def test_prompt_may_be_text_or_ids_alone_or_in_a_list(server, prompt):
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert reply.status == 200, reply.data


def test_stop_string_ends_the_answer(server):
    fields = {"prompt": "abc", "max_tokens": 50, "stop": ["c"]}
    plain = server.post("/v1/completions", fields).json
    events = server.post("/v1/completions", fields | {"stream": True}).events
    (choice,) = plain["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" ab", "stop", "c")
    assert join(events) == {0: (" ab", "stop")}
    assert events[-1]["choices"][0]["stop_reason"] == "c"


def test_logprobs_are_columns_with_offsets(server):
    fields = {"prompt": "ab", "max_tokens": 4, "logprobs": 2}
    plain = server.post("/v1/completions", fields).json["choices"][0]["logprobs"]
    assert plain["tokens"] == ["<s>", " a", "b", "<s>"]
    assert plain["text_offset"] == [0, 0, 2, 3]  # what is special is no part of the text
    assert plain["token_logprobs"] == [-0.5] * 4
    assert [len(top) for top in plain["top_logprobs"]] == [2] * 4

    events = server.post("/v1/completions", fields | {"stream": True}).events
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [x for part in parts for x in part[name]] for name in plain} == plain


def test_zero_logprobs_report_the_chosen_token_alone(server):
    fields = {"prompt": "ab", "max_tokens": 1, "logprobs": 0}
    logprobs = server.post("/v1/completions", fields).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"<s>": -0.5}]
