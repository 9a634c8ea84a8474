"""The GET routes, and the OpenAPI document."""

from dataclasses import fields

import octavo
from octavo.config import EngineConfig
from octavo.engine.limits import ServingLimits
from octavo.entrypoints.server_settings import ServerSettings
from tests.live_server import running_checkpoint, running_server

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4}


def test_health_has_no_body_while_the_engine_lives(server):
    reply = server.get("/health")
    assert (reply.status, reply.data) == (200, b"")
    assert server.get("/ready").status == 200


def test_dead_engine_is_reported(caplog):
    with running_server() as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        server.kill_core()
        replies = [server.get("/health"), server.get("/ready")]
        refused = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        pings = [server.get("/ping"), server.request("POST", "/ping")]
    assert [reply.status for reply in [*replies, *pings, refused]] == [503] * 5
    assert refused.json["error"]["type"] == "ServiceUnavailableError"


def test_engine_that_stands_still_lives_but_is_not_ready(gated, caplog):
    core, device = gated
    with running_server(core, limits=ServingLimits(stall_timeout_s=0.1)) as server:
        assert server.post("/v1/completions", COMPLETION).status == 200
        device.close()
        collect = server.start_posts("/v1/completions", *[COMPLETION | {"request_id": "a"}] * 2)
        server.wait_until(lambda: server.get("/ready").status == 503)
        error = server.get("/ready").json["error"]
        server.service.engine.control._timeout_s = 0.01
        explained = server.get("/v1/requests/cmpl-a")
        assert server.get("/health").status == 200
        assert server.metric("octavo_stall_seconds") > 0.1
        device.open()
        assert [reply.status for reply in collect()] == [200, 200]
        assert server.get("/ready").status == 200
        assert server.metric("octavo_stall_seconds") == 0
    assert error["reason_code"] == "stalled"
    assert "the oldest request, cmpl-a (number 1), waits" in error["message"]
    assert explained.status == 503
    assert "cmpl-a" in explained.json["error"]["message"]
    levels = [record.levelname for record in caplog.records if record.name == "octavo.engine.stall"]
    assert levels == ["ERROR", "WARNING"]
    assert "cmpl-a (number 1)" in caplog.text


def test_ping_is_health(server):
    for method in ("GET", "POST"):
        reply = server.request(method, "/ping")
        assert (reply.status, reply.data) == (200, b"")


def test_a_request_is_explained_from_its_queue_to_its_delivery(gated):
    core, device = gated
    with running_server(core) as server:
        device.close()
        collect = server.start_posts("/v1/completions", COMPLETION)
        server.wait_until(lambda: core.scheduler.running)
        collect_second = server.start_posts("/v1/completions", COMPLETION | {"request_id": "b"})
        server.wait_until(lambda: server.service.engine.num_open_requests == 2)
        device.open()
        assert [reply.status for reply in [*collect(), *collect_second()]] == [200, 200]
        (facts,) = server.get("/v1/requests/cmpl-b").json["data"]
        assert server.get("/v1/requests/cmpl-nobody").status == 404
    assert (facts["state"], facts["finish_reason"], facts["wait_reason"]) == (
        "finished",
        "length",
        None,
    )
    counts = ("num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_retractions")
    assert [facts[name] for name in counts] == [3, 4, 6, 0]
    assert all(facts[f"{part}_s"] >= 0 for part in ("queue", "prefill", "decode", "deliver"))


def test_version(server):
    assert server.get("/version").json == {"version": octavo.__version__}


def test_every_served_name_has_a_model_card(server):
    body = server.get("/v1/models").json
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    for card in body["data"]:
        assert card["max_model_len"] == 4096
        assert card["root"] == "somewhere/tiny"
        assert server.post("/v1/completions", {"model": card["id"], "prompt": "a"}).status == 200


def test_a_model_card_is_found_by_its_name(server):
    listed = server.get("/v1/models").json["data"]
    for card in listed:
        assert server.get(f"/v1/models/{card['id']}").json == card
    for name in ("other", "somewhere/tiny", "a%2Fb", "%ED%A0%80", ".."):
        reply = server.get(f"/v1/models/{name}")
        assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")


def test_a_name_with_slashes_is_one_name(server, monkeypatch):
    monkeypatch.setattr(server.service, "model_names", ("meta/llama",))
    for path in ("meta/llama", "meta%2Fllama"):
        assert server.get(f"/v1/models/{path}").json["id"] == "meta/llama"


def test_the_settings_are_told_with_what_was_resolved_and_no_secret(tiny_spm):
    secret = "hf_hunter2"
    with running_checkpoint(tiny_spm, hf_token=secret, max_num_seqs=7) as server:
        server.service.settings = ServerSettings()
        reply = server.get("/server_info")
    info = reply.json
    assert info["version"] == octavo.__version__
    assert info["model_names"] == ["tiny", "alias"]
    assert set(info["engine_settings"]) == {setting.name for setting in fields(EngineConfig)}
    assert info["engine_settings"]["model"] == str(tiny_spm)
    assert info["engine_settings"]["max_num_seqs"] == 7
    resolved = ("device", "dtype", "attention_backend", "max_num_batched_tokens")
    assert [info["engine_settings"][n] for n in resolved] == ["cpu", "float32", "cpu", 1_024]
    assert info["engine_settings"]["hf_token"] == "(hidden)"
    assert set(info["server_settings"]) == {setting.name for setting in fields(ServerSettings)}
    assert info["limits"]["num_blocks"] == 256
    assert b"hunter2" not in reply.data


def test_metrics_are_prometheus_text(server):
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in reply.data.decode()


def test_requests_move_the_metrics(server):
    names = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
    before = [server.metric(f"vllm:{name}") for name in names]
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4})
    after = [server.metric(f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 3, 1]


def test_openapi_document_describes_the_bodies(server):
    document = server.get("/openapi.json").json
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        assert "temperature" in schema["properties"]
    assert "$defs" not in str(document)
