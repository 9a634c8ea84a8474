"""HTTP requests are counted by route; what clients make up makes no series."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live_server import running_server

KEY = {"authorization": "Bearer k"}


def read_counts(server):
    text = server.request("GET", "/metrics", headers=KEY).data.decode()
    return {
        tuple(sample.labels[name] for name in ("method", "status", "handler")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_requests_are_counted_by_route_and_status(root_path):
    completion = {"prompt": "a", "max_tokens": 2}
    with running_server(api_key=["k"], root_path=root_path) as server:
        for fields in ({}, {"stream": True}, {"n": 0}):
            server.post("/v1/completions", completion | fields, KEY)
        server.post("/v1/completions", completion)
        for path in ("/v1/models/tiny", "/v1/models/other", "/a", "/b"):
            server.request("GET", path, headers=KEY)
        server.wait_until(lambda: sum(read_counts(server).values()) > 8)
        counts = read_counts(server)
    assert counts["POST", "2xx", "/v1/completions"] == 2
    assert counts["POST", "4xx", "/v1/completions"] == 1
    assert counts["POST", "4xx", "none"] == 1
    assert counts["GET", "2xx", "/v1/models/{model_id:path}"] == 1
    assert counts["GET", "4xx", "/v1/models/{model_id:path}"] == 1
    assert counts["GET", "4xx", "none"] == 2
