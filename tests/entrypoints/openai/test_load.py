"""GET /load: how many requests are open, and which, without a word of their text."""

import pytest

from tests.live_server import running_server

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4, "request_id": "first"}
SECRET = "attack at dawn"
CHAT = {
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 3,
    "n": 2,
    "request_id": "second",
}


def test_an_idle_server_has_no_load(server):
    assert server.get("/load").json == {"server_load": 0}
    assert server.get("/load?include_inflight=true").json == {"server_load": 0, "inflight": []}


def test_open_requests_are_listed_with_their_numbers_alone(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        first = server.start_posts("/v1/completions", COMPLETION)
        server.wait_until(lambda: core.scheduler.running)
        second = server.start_posts("/v1/chat/completions", CHAT)
        server.wait_until(lambda: server.get("/load").json == {"server_load": 2})
        reply = server.get("/load?include_inflight=true")
        device.open()
        assert [reply.status for reply in (*first(), *second())] == [200, 200]
        assert server.get("/load").json == {"server_load": 0}
    one, two = reply.json["inflight"]
    assert (one["id"], one["n"], one["prompt_tokens"]) == ("cmpl-first", 1, 3)
    assert (two["id"], two["n"], two["state"]) == ("chatcmpl-second", 2, "waiting")
    assert one["age_s"] >= two["age_s"] >= 0
    assert two["completion_tokens"] == two["cached_tokens"] == 0
    assert SECRET not in str(reply.json)


def test_a_request_runs_from_its_first_step_on_and_its_tokens_are_counted(gated):
    with running_server(gated[0]) as server:
        server.post("/v1/completions", COMPLETION | {"prompt": [9] * 40})
        body = COMPLETION | {"prompt": [9] * 40, "max_tokens": 4_000}
        collect = server.start_posts("/v1/completions", body)
        server.wait_until(lambda: list_open(server)[0]["completion_tokens"] > 2)
        (entry,) = list_open(server)
        assert entry["state"] == "running"
        assert entry["cached_tokens"] == 32
        server.loop.call_soon_threadsafe(server.service.engine.abort, "cmpl-first")
        assert collect()[0].json["choices"][0]["finish_reason"] == "abort"


def list_open(server):
    entries = server.get("/load?include_inflight=true").json["inflight"]
    return entries or [{"completion_tokens": 0}]


def test_the_list_has_a_limit_and_begins_with_the_oldest(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        collects = []
        for number in range(4):
            body = COMPLETION | {"request_id": str(number)}
            collects.append(server.start_posts("/v1/completions", body))
            server.wait_until(lambda: server.get("/load").json["server_load"] == len(collects))
        load = server.get("/load?include_inflight=1&inflight_limit=3").json
        assert load["server_load"] == 4
        assert [entry["id"] for entry in load["inflight"]] == ["cmpl-0", "cmpl-1", "cmpl-2"]
        device.open()
        assert all(reply.status == 200 for collect in collects for reply in collect())


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("inflight_limit=0", "inflight_limit"),
        ("inflight_limit=1001", "inflight_limit"),
        ("inflight_limit=many", "inflight_limit"),
        ("inflight_limit=1&inflight_limit=", "inflight_limit"),
        ("include_inflight=perhaps", "include_inflight"),
        ("include_prompts=true", "include_prompts"),
    ],
)
def test_parameters_that_cannot_be_are_refused(server, query, parameter):
    reply = server.get(f"/load?{query}")
    assert reply.status == 400
    assert reply.json["error"]["param"] == parameter
