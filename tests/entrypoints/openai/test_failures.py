"""What clients see when the server itself cannot do its work."""

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.door import QueueCaps
from octavo.engine.limits import ServingLimits
from octavo.entrypoints.openai.forms import CompletionForm
from octavo.entrypoints.openai.generation import Generation
from tests.fake_executor import FakeExecutor, Faults
from tests.live_server import running_checkpoint, running_server

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4}


def test_bug_is_a_500_that_tells_nothing_and_is_logged(server, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Generation, "respond", fail)
    reply = server.post("/v1/completions", COMPLETION)
    assert (reply.status, reply.json["error"]["type"]) == (500, "InternalServerError")
    assert b"secret" not in reply.data
    monkeypatch.undo()
    assert server.post("/v1/completions", COMPLETION).status == 200
    assert [record for record in caplog.records if record.exc_info[0] is ZeroDivisionError]


@pytest.mark.parametrize("num_good", [0, 1])
def test_bug_inside_a_stream_is_an_error_and_aborts_the_request(
    server, monkeypatch, caplog, num_good
):
    write_chunk, calls = CompletionForm.write_chunk, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > num_good:
            raise ZeroDivisionError
        return write_chunk(*arguments)

    monkeypatch.setattr(CompletionForm, "write_chunk", fail)
    body = COMPLETION | {"max_tokens": 4000, "stream": True}
    reply = server.post("/v1/completions", body)
    if num_good:
        assert reply.status == 200
        assert reply.events[-1]["error"]["code"] == 500
    else:
        assert (reply.status, reply.json["error"]["code"]) == (500, 500)
    assert any(record.exc_info for record in caplog.records)
    server.call(server.service.engine.wait_until_idle())


def test_ending_server_refuses_requests_on_open_connections(server, monkeypatch):
    monkeypatch.setattr(server.service, "is_draining", True)
    for path, body in (
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        reply = server.post(path, body)
        assert (reply.status, reply.json["error"]["type"]) == (503, "ServiceUnavailableError")
    assert server.get("/ready").status == 503
    assert server.get("/health").status == 200


def test_engine_without_a_tokenizer_takes_and_gives_ids_alone(tiny_spm):
    with running_checkpoint(tiny_spm, skip_tokenizer_init=True) as server:
        reply = server.post("/v1/completions", COMPLETION | {"ignore_eos": True})
        assert reply.json["usage"]["completion_tokens"] == 4
        assert reply.json["choices"][0]["text"] == ""
        for body in ({"prompt": "text"}, COMPLETION | {"stop": "x"}):
            assert server.post("/v1/completions", body).status == 400
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.post("/v1/chat/completions", chat).status == 400


def test_full_queue_is_429_with_a_time_to_retry(tiny_spm):
    options = {"limits": ServingLimits(queue_caps=QueueCaps(max_requests=1))}
    with running_checkpoint(tiny_spm, options=options, max_num_seqs=1) as server:
        long = COMPLETION | {"max_tokens": 250, "ignore_eos": True}
        collect = server.start_posts("/v1/completions", long)
        server.wait_for_metric("vllm:num_requests_running", 1)
        collect_waiting = server.start_posts("/v1/completions", COMPLETION)
        server.wait_for_metric("vllm:num_requests_waiting", 1)
        refused = server.post("/v1/completions", COMPLETION | {"stream": True})
        assert [reply.status for reply in [*collect(), *collect_waiting()]] == [200, 200]
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["reason_code"] == "queue_full_requests"


@pytest.mark.parametrize("stream", [False, True])
def test_non_finite_logits_fail_their_request_alone(stream):
    executor = FakeExecutor(vocab_size=345, block_size=16, faults=Faults(non_finite={0: 5}))
    config = SchedulerConfig(
        num_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
    )
    with running_server(EngineCore(executor, config, lag=0)) as server:
        failed = server.post("/v1/completions", COMPLETION | {"stream": stream})
        assert server.post("/v1/completions", COMPLETION).status == 200
    error = failed.events[-1]["error"] if stream else failed.json["error"]
    assert failed.status == (200 if stream else 500)
    assert (error["message"], error["code"]) == ("non-finite logits", 500)


def test_parameters_that_leave_no_token_are_the_clients_fault(tiny_spm):
    with running_checkpoint(tiny_spm) as server:
        letter = server.post("/tokenize", {"prompt": "za", "add_special_tokens": False}).json
        body = {"prompt": "z", "allowed_token_ids": letter["tokens"][-1:], "max_tokens": 4}
        for bad_word, num_tokens in (("a", 0), ("aa", 1)):
            excluding = body | {"bad_words": [bad_word]}
            plain = server.post("/v1/completions", excluding)
            check_no_token_left(plain.json["error"], plain.status)
            stream = server.post("/v1/completions", excluding | {"stream": True})
            if num_tokens == 0:
                assert (stream.status, stream.data) == (plain.status, plain.data)
            else:
                assert stream.events[0]["choices"][0]["text"] == "a"
                check_no_token_left(stream.events[-1]["error"], 400)
        assert server.metric("vllm:corrupted_requests_total") == 0
        assert server.post("/v1/completions", body).json["choices"][0]["text"] == "aaaa"


def check_no_token_left(error, status):
    assert (status, error["code"], error["reason_code"]) == (400, 400, "no_token_left")
    assert "bad_words" in error["message"]
