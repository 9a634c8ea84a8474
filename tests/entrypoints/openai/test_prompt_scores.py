"""Echo, log-probabilities of prompts and token ids on a whole engine, streamed and whole."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.live_server import running_checkpoint

PATH = "/v1/completions"
TEXT = "In a small village near the sea lived 2 cats and a dog, who were 😀 friends."
COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@pytest.fixture(scope="module")
def live(tiny_spm):
    with running_checkpoint(tiny_spm, max_num_batched_tokens=16) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(tiny_spm):
    return AutoModelForCausalLM.from_pretrained(tiny_spm, dtype=torch.float32).eval()


def score(oracle, token_ids):
    """Return the log-probability of each token but the first under the model."""
    with torch.no_grad():
        logits = oracle(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)[range(len(token_ids) - 1), token_ids[1:]].tolist()


def join_events(events):
    """Return the choices that the chunks of a stream add up to."""
    choices = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            assert "finish_reason" not in whole, "a chunk after the finish"
            whole["text"] += part["text"]
            if part["logprobs"] is not None:
                columns = whole["logprobs"] or {name: [] for name in COLUMNS}
                whole["logprobs"] = {
                    name: columns[name] + part["logprobs"][name] for name in COLUMNS
                }
            for name in ("token_ids", "prompt_token_ids"):
                if name in part:
                    whole[name] = whole.get(name, []) + part[name]
            if part["finish_reason"]:
                whole |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return [{"index": index, **choices[index]} for index in sorted(choices)]


def complete(server, **fields):
    """Return the choices and the usage, which must be the same streamed and whole."""
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 3, **fields}
    whole = server.post(PATH, body)
    assert whole.status == 200, whole.data
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = server.post(PATH, body | options)
    *chunks, last = streamed.events
    choices = whole.json["choices"]
    joined = join_events(chunks)
    assert [sorted(choice) for choice in joined] == [sorted(choice) for choice in choices]
    for mine, theirs in zip(joined, choices, strict=True):
        mine, theirs = dict(mine), dict(theirs)
        check_equal_columns(mine.pop("logprobs"), theirs.pop("logprobs"))
        assert mine == theirs
    counts = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert counts == {name: whole.json["usage"][name] for name in counts}
    return choices, whole.json["usage"]


def check_equal_columns(one, other):
    """Log-probabilities differ in the last digit when they are computed in other company."""
    if one is None or other is None:
        assert one == other
        return
    assert (one["tokens"], one["text_offset"]) == (other["tokens"], other["text_offset"])
    assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)
    for mine, theirs in zip(one["top_logprobs"], other["top_logprobs"], strict=True):
        assert mine == (theirs if theirs is None else pytest.approx(theirs, abs=1e-4))


def test_echo_puts_the_prompt_before_the_answer(live):
    ((plain,), _), ((echoed,), usage) = (
        complete(live, prompt=TEXT, echo=echo) for echo in (False, True)
    )
    assert echoed["text"] == TEXT + plain["text"]
    assert echoed["logprobs"] is None
    assert usage["completion_tokens"] == 3


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_logprobs_are_those_of_the_model(live, oracle, max_tokens, as_ids):
    ids = live.service.model.tokenizer.encode(TEXT)
    fields = {"prompt": ids if as_ids else TEXT, "max_tokens": max_tokens, "return_token_ids": True}
    for _ in range(2):  # the second time the prompt is in the cache
        (choice,), usage = complete(live, echo=True, logprobs=1, **fields)
        assert choice["prompt_token_ids"] == ids
        everything = ids + choice["token_ids"]
        logprobs = choice["logprobs"]
        assert {name: len(logprobs[name]) for name in COLUMNS} == dict.fromkeys(
            COLUMNS, len(everything)
        )
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(score(oracle, everything), abs=1e-3)
        assert usage["completion_tokens"] == max_tokens
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert choice["finish_reason"] == "length"
        # A prompt of ids has nothing that the tokenizer added: its BOS is shown.
        assert choice["text"].startswith("<s> " + TEXT if as_ids else TEXT)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_offsets_point_at_the_tokens_in_the_text(live, as_ids, skip_special_tokens):
    tokenizer = live.service.model.tokenizer
    prompt = tokenizer.encode(TEXT) if as_ids else TEXT
    fields = {"skip_special_tokens": skip_special_tokens, "max_tokens": 20, "logprobs": 0}
    (choice,), _ = complete(live, prompt=prompt, echo=True, **fields)
    text, logprobs = choice["text"], choice["logprobs"]
    ends = [*logprobs["text_offset"][1:], len(text)]
    shown = []
    for token, begin, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert begin <= end
        if end > begin and "\ufffd" not in token + text[begin:end]:
            assert text[begin:end] in (token, token.lstrip())
        shown.append(text[begin:end])
    assert "".join(shown) == text


def test_nothing_is_generated_for_a_scored_prompt(live):
    before = live.metric("vllm:generation_tokens_total")
    for echo, logprobs in ((True, None), (True, 2)):
        (choice,), usage = complete(
            live, prompt=TEXT, echo=echo, logprobs=logprobs, max_tokens=0, return_token_ids=True
        )
        assert (choice["text"], choice["token_ids"]) == (TEXT, [])
        assert usage["completion_tokens"] == 0
        assert usage["total_tokens"] == usage["prompt_tokens"]
    assert live.metric("vllm:generation_tokens_total") == before


def test_a_scored_prompt_may_fill_the_context(live):
    limit = live.service.engine.info.max_tokens_per_request
    full, longer = [5] * limit, [5] * (limit + 1)
    (choice,), _ = complete(live, prompt=full, echo=True, logprobs=0, max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == limit
    for prompt, max_tokens in ((full, 1), (longer, 0)):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": max_tokens}
        error = live.post(PATH, body).json["error"]
        assert (error["code"], error["reason_code"]) == (400, "prompt_too_long")
        assert str(limit) in error["message"]
        assert str(len(prompt)) in error["message"]


def test_no_tokens_without_anything_to_report_are_refused(live):
    error = live.post(PATH, {"prompt": TEXT, "max_tokens": 0}).json["error"]
    assert (error["code"], error["param"]) == (400, "max_tokens")


def test_prompt_logprobs_have_vllms_form(live, oracle):
    ids = live.service.model.tokenizer.encode(TEXT)
    body = {"prompt": TEXT, "prompt_logprobs": 2, "max_tokens": 1, "n": 2, "seed": 3}
    choices = live.post(PATH, body).json["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *others = choices[0]["prompt_logprobs"]
    assert first is None
    own = [entry[str(token_id)] for entry, token_id in zip(others, ids[1:], strict=True)]
    assert [entry["logprob"] for entry in own] == pytest.approx(score(oracle, ids), abs=1e-3)
    assert {frozenset(entry) for entry in own} == {frozenset({"logprob", "rank", "decoded_token"})}
    for entry in others:
        ranks = sorted(item["rank"] for item in entry.values())
        assert ranks[:2] == [1, 2]


def test_chat_has_prompt_logprobs_and_token_ids_beside_its_choices(live):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "max_tokens": 2,
        "ignore_eos": True,
    }
    reply = live.post("/v1/chat/completions", body).json
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"] == 22
    assert [entry and list(entry) for entry in reply["prompt_logprobs"]] == [
        None,
        *([str(token_id)] for token_id in reply["prompt_token_ids"][1:]),
    ]
    assert len(reply["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_asked_for_is_not_sent(live, path, stream):
    body = {"prompt": "hi"} if path == PATH else {"messages": [{"role": "user", "content": "hi"}]}
    reply = live.post(path, body | {"max_tokens": 2, "stream": stream})
    for name in (b"token_ids", b"prompt_logprobs", b"prompt_token_ids"):
        assert name not in reply.data


def test_prompt_logprobs_are_not_sent_in_streams(live):
    body = {"prompt": "hi", "prompt_logprobs": 0, "stream": True}
    error = live.post(PATH, body).json["error"]
    assert (error["code"], error["param"]) == (400, "prompt_logprobs")


def test_tokens_may_be_called_by_their_ids(live):
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,), _ = complete(live, prompt=TEXT, echo=True, logprobs=3, max_tokens=2, **fields)
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    for token, top in zip(ids[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert f"token_id:{token}" in top
        assert len(top) in (3, 4)


@pytest.mark.parametrize("n", [1, 3])
def test_several_answers_begin_with_the_same_prompt(live, n):
    fields = {"n": n, "temperature": 1.0, "seed": 5, "logprobs": 1, "return_token_ids": True}
    choices, usage = complete(live, prompt=TEXT, echo=True, **fields)
    assert len(choices) == n
    ids = live.service.model.tokenizer.encode(TEXT)
    for choice in choices:
        assert choice["text"].startswith(TEXT)
        assert choice["prompt_token_ids"] == ids
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 3
    assert usage["completion_tokens"] == 3 * n


def test_minus_infinity_is_no_json(live):
    for fields in ({"top_k": 1}, {"top_p": 0.01}, {"logit_bias": {"5": -100}}):
        body = {"prompt": TEXT, "temperature": 1, "max_tokens": 4, "logprobs": 5, **fields}
        for echo in (False, True):
            assert live.post(PATH, body | {"echo": echo}).json["choices"]
            assert live.post(PATH, body | {"echo": echo, "stream": True}).events
