"""The admin routes over HTTP: what they do to open requests, and who may use them."""

import time

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.limits import ServingLimits
from tests.entrypoints.openai.test_disconnects import close, open_request, reset
from tests.fake_executor import FakeExecutor
from tests.live_server import running_server

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4}
LONG = {"prompt": [5, 6, 7], "max_tokens": 7_000, "seed": 1}
MEDIUM = LONG | {"max_tokens": 250}
ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
]


class SteadyExecutor(FakeExecutor):
    """Takes its time for each step, so that a request is still open when the test pauses it."""

    def read(self, handle):
        time.sleep(0.002)
        return super().read(handle)


def make_core(*, lag=0):
    config = SchedulerConfig(
        num_blocks=2_048,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=8_192,
    )
    executor = SteadyExecutor(config.num_blocks, config.block_size, lag, num_rows=4, vocab_size=345)
    return EngineCore(executor, config, lag=lag)


@pytest.fixture(scope="module", params=[0, 1])
def live(request):
    with running_server(make_core(lag=request.param), has_admin=True) as server:
        yield server


@pytest.fixture
def admin(live):
    yield live
    check_idle(live)


@pytest.fixture(params=[0, 1])
def ending(request):
    """A server for a test that ends it."""
    with running_server(make_core(lag=request.param), has_admin=True) as server:
        yield server


def check_idle(server):
    server.post("/resume", {})
    server.post("/abort_requests", {"all": True})
    server.wait_for_metric("vllm:num_requests_running", 0)
    assert server.post("/v1/completions", COMPLETION).status == 200
    assert server.core.scheduler.block_manager.pool.num_used == 0
    assert server.service.engine.num_open_requests == 0


def start_running(server, count=2, body=LONG):
    """Let requests run; returns what collects their replies."""
    bodies = [body | {"request_id": str(index)} for index in range(count)]
    collect = server.start_posts("/v1/completions", *bodies)
    server.wait_for_metric("vllm:num_requests_running", count)
    return collect


def pause(server, query=""):
    reply = server.request("POST", f"/pause{query}")
    assert (reply.status, reply.json) == (200, {"status": "paused"})


def resume(server):
    reply = server.request("POST", "/resume")
    assert (reply.status, reply.json) == (200, {"status": "resumed"})


def test_a_pause_keeps_requests_where_they_are_and_loses_no_token(admin):
    expected = admin.post("/v1/completions", MEDIUM)
    collect = start_running(admin, body=MEDIUM)
    pause(admin)
    scheduler = admin.core.scheduler
    computed = [request.num_computed_tokens for request in scheduler.running.values()]
    num_steps = len(admin.core._executor.steps)
    late = admin.start_posts("/v1/completions", COMPLETION)
    admin.wait_until(lambda: admin.service.engine.num_open_requests == 3)
    assert admin.get("/is_paused").json == {"is_paused": True}
    assert [request.num_computed_tokens for request in scheduler.running.values()] == computed
    assert len(admin.core._executor.steps) == num_steps
    resume(admin)
    assert admin.get("/is_paused").json == {"is_paused": False}
    replies = [*collect(), *late()]
    assert [reply.status for reply in replies] == [200, 200, 200]
    for reply in replies[:2]:
        assert reply.json["choices"] == expected.json["choices"]


def test_a_paused_server_lives_and_is_not_ready(admin):
    pause(admin)
    assert admin.get("/health").status == 200
    reply = admin.get("/ready")
    assert (reply.status, reply.json["error"]["reason_code"]) == (503, "paused")
    assert admin.metric("octavo_paused") == 1
    resume(admin)
    assert admin.get("/ready").status == 200
    assert admin.metric("octavo_paused") == 0


def test_pausing_twice_and_resuming_without_a_pause(admin):
    resume(admin)
    pause(admin)
    pause(admin)
    resume(admin)
    assert admin.post("/v1/completions", COMPLETION).status == 200
    resume(admin)


def test_who_waits_in_a_pause_is_told_so(admin):
    collect = start_running(admin, 1, MEDIUM)
    pause(admin)
    late = admin.start_posts("/v1/completions", COMPLETION | {"request_id": "late"})
    admin.wait_for_metric("octavo_num_requests_waiting_by_reason", 1)
    for request_id in ("cmpl-0", "cmpl-late"):
        *_, entry = admin.get(f"/v1/requests/{request_id}").json["data"]
        assert entry["wait_reason"] == "the engine is paused"
    resume(admin)
    assert [reply.status for reply in (*collect(), *late())] == [200, 200]


def test_a_pause_is_no_stall(caplog):
    core = make_core()
    limits = ServingLimits(stall_timeout_s=0.05)
    with running_server(core, has_admin=True, limits=limits) as server:
        collect = start_running(server, 1, MEDIUM)
        pause(server)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert server.get("/ready").json["error"]["reason_code"] == "paused"
        assert server.metric("octavo_stall_seconds") == 0
        resume(server)
        assert server.get("/ready").status == 200
        assert collect()[0].status == 200
    assert [record for record in caplog.records if record.name == "octavo.engine.stall"] == []


def test_a_pause_that_aborts_ends_what_is_open(admin):
    collect = start_running(admin)
    pause(admin, "?mode=abort&clear_cache=true")
    assert {reply.json["choices"][0]["finish_reason"] for reply in collect()} == {"abort"}
    assert admin.get("/is_paused").json == {"is_paused": True}
    admin.wait_for_metric("vllm:num_requests_running", 0)
    assert admin.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("leave", [close, reset])
def test_clients_that_go_away_in_a_pause_leave_nothing(admin, leave):
    before = admin.metric("vllm:request_success_total")
    connections = [open_request(admin, "/v1/completions", LONG) for _ in range(6)]
    admin.wait_for_metric("vllm:num_requests_running", 4)
    pause(admin)
    for connection in connections:
        leave(connection)
    admin.wait_for_metric("vllm:request_success_total", before + 6)
    assert admin.service.engine.num_open_requests == 0
    assert admin.core.scheduler.block_manager.pool.num_used == 0
    assert admin.get("/is_paused").json == {"is_paused": True}


def test_time_goes_on_in_a_pause(admin):
    pause(admin)
    reply = admin.post("/v1/completions", LONG | {"timeout": 0.1})
    assert (reply.status, reply.json["error"]["reason_code"]) == (504, "request_timeout")


def test_requests_are_aborted_by_their_ids(admin):
    collect = start_running(admin, 3)
    body = {"request_ids": ["cmpl-1", "nobody", "cmpl-1", "0", "", "\u00e9" * 1000]}
    reply = admin.post("/abort_requests", body)
    assert reply.status == 200
    assert reply.json == {"aborted": ["cmpl-1"], "unknown": ["nobody", "0", "", "\u00e9" * 1000]}
    assert admin.post("/abort_requests", {"request_ids": []}).json == {"aborted": [], "unknown": []}
    reply = admin.post("/abort_requests", {"all": True})
    assert set(reply.json["aborted"]) <= {"cmpl-0", "cmpl-2"}
    reasons = [reply.json["choices"][0]["finish_reason"] for reply in collect()]
    assert reasons == ["abort"] * 3
    assert admin.post("/abort_requests", {"all": True}).json == {"aborted": [], "unknown": []}


def test_aborting_in_a_pause_ends_streams_at_once(admin):
    collect = start_running(admin, 2, MEDIUM | {"stream": True})
    pause(admin)
    assert admin.post("/abort_requests", {"request_ids": ["cmpl-0"]}).json["aborted"] == ["cmpl-0"]
    admin.wait_for_metric("vllm:num_requests_running", 1)
    assert admin.get("/is_paused").json == {"is_paused": True}
    resume(admin)
    reasons = [reply.events[-1]["choices"][0]["finish_reason"] for reply in collect()]
    assert reasons == ["abort", "length"]


def test_the_prefix_cache_is_dropped(admin):
    body = COMPLETION | {"prompt": [9] * 40}
    cached = []
    for drop in (False, False, True):
        if drop:
            assert admin.request("POST", "/reset_prefix_cache").json["num_blocks_dropped"] > 0
        usage = admin.post("/v1/completions", body).json["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0]
    admin.request("POST", "/reset_prefix_cache")
    assert admin.request("POST", "/reset_prefix_cache").json == {"num_blocks_dropped": 0}


def test_sigterm_in_a_pause_lets_open_requests_end(ending):
    ending.server._shutdown_timeout_s = 20
    collect = start_running(ending, 1, MEDIUM)
    pause(ending)
    ending.stop()
    assert collect()[0].json["choices"][0]["finish_reason"] == "length"
    ending.thread.join()
    assert ending.status == 0


def test_sigterm_in_a_pause_without_time_ends_open_requests(ending):
    collect = start_running(ending)
    pause(ending)
    ending.stop()
    assert {reply.json["choices"][0]["finish_reason"] for reply in collect()} == {"abort"}
    ending.thread.join()
    assert ending.status == 0


def test_a_server_that_ends_is_not_paused_any_more(admin, monkeypatch):
    monkeypatch.setattr(admin.service, "is_draining", True)
    assert admin.request("POST", "/pause").status == 503
    assert admin.get("/is_paused").json == {"is_paused": False}


def test_a_core_that_stands_still_is_paused_when_it_goes_on(gated):
    core, device = gated
    with running_server(core, has_admin=True) as server:
        device.close()
        collect = server.start_posts("/v1/completions", COMPLETION)
        server.wait_until(lambda: core.scheduler.running)
        server.service.engine.control._timeout_s = 0.01
        for path in ("/pause", "/reset_prefix_cache"):
            reply = server.request("POST", path)
            assert reply.status == 503
            assert "long step" in reply.json["error"]["message"]
        device.open()
        server.wait_until(lambda: server.get("/is_paused").json["is_paused"])
        assert server.request("POST", "/resume").status in (200, 503)
        assert collect()[0].status == 200


def test_a_dead_engine_can_neither_be_paused_nor_resumed(caplog):
    with running_server(has_admin=True) as server:
        server.kill_core()
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            assert server.request("POST", path).status == 503
        assert server.post("/abort_requests", {"all": True}).status == 200
        assert server.get("/ready").status == 503


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_exist_only_when_they_are_asked_for(server, method, path):
    assert server.request(method, path).status == 404
    assert path not in server.get("/openapi.json").json["paths"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_web_pages_are_kept_out(admin, method, path):
    headers = {"origin": "http://evil.example", "content-type": "application/json"}
    reply = admin.request(method, path, b'{"all": true}', headers)
    assert (reply.status, reply.json["error"]["type"]) == (403, "PermissionDeniedError")
    assert admin.get("/is_paused").json == {"is_paused": False}


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/pause?mode=wait", "mode"),
        ("/pause?wait_for_inflight_requests=true", "wait_for_inflight_requests"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/resume?x=1", "x"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
    ],
)
def test_parameters_that_do_nothing_here_are_refused(admin, path, parameter):
    reply = admin.request("POST", path)
    assert reply.status == 400
    assert reply.json["error"]["param"] == parameter
    assert admin.get("/is_paused").json == {"is_paused": False}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"all": False},
        {"all": True, "request_ids": ["a"]},
        {"request_ids": "a"},
        {"request_ids": [1]},
        {"request_ids": None},
        {"all": "true"},
        {"all": True, "ids": ["a"]},
        [],
        b"",
        b"[" * 100_000,
        b'{"request_ids": ["\\ud800"]}',
    ],
)
def test_bodies_that_name_nothing_to_abort_are_refused(admin, body):
    assert admin.post("/abort_requests", body).status == 400


def test_the_document_marks_exactly_the_admin_routes(admin):
    paths = admin.get("/openapi.json").json["paths"]
    marked = {
        (method.upper(), path)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if operation.get("x-octavo-admin")
    }
    assert marked == set(ROUTES)


@pytest.mark.parametrize("body", [{}, {"all": False}, {"all": True, "request_ids": ["a"]}])
def test_the_refusal_of_a_choice_names_the_field(admin, body):
    error = admin.post("/abort_requests", body).json["error"]
    assert (error["code"], error["param"], error["reason_code"]) == (
        400,
        "request_ids",
        "invalid_value",
    )
    assert error["message"] == "give either request_ids or all, which must be true"
