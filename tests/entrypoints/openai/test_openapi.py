"""The OpenAPI document: what it says of the routes is what they do."""

import json

import pytest

from octavo.entrypoints.openai.openapi import ERROR, LIMITS
from tests.live_server import running_server

COMPLETION = {"prompt": "ab", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
STEP = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}
"""From a limit to the nearest value that it excludes, or one near it."""


@pytest.fixture(scope="module")
def document():
    with running_server(has_admin=True) as server:
        return server.get("/openapi.json").json


def list_operations(document):
    return [
        (method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def find_body(document, path):
    operation = document["paths"][path]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]


def test_every_operation_says_what_it_does_and_how_it_fails(document):
    for method, path, operation in list_operations(document):
        place = f"{method} {path}"
        assert operation["summary"], place
        assert set(operation["responses"]) == {"200", "default"}, place
        content = operation["responses"]["default"]["content"]
        assert content["application/json"]["schema"] == ERROR, place


def test_head_is_get_without_a_body(server):
    paths = server.get("/openapi.json").json["paths"]
    del paths["/v1/requests/{request_id}"]  # the core of this server answers no questions
    for path, operations in paths.items():
        got = server.get(path)
        head = server.request("HEAD", path)
        assert (head.status, head.data) == (got.status, b""), path
        assert head.headers["content-type"] == got.headers["content-type"], path
        assert (head.status == 405) is ("get" not in operations), path


def test_no_two_operations_have_one_name(document):
    names = [o["operationId"] for _, _, o in list_operations(document) if "operationId" in o]
    assert len(names) == len(set(names))


def test_nothing_points_out_of_the_document(document):
    text = json.dumps(document)
    assert "$defs" not in text
    named = set(document["components"]["schemas"])
    pointers = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert pointers <= named


def test_bodies_are_described_whole(document):
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert "temperature" in find_body(document, path)["properties"]
    chat = find_body(document, "/v1/chat/completions")
    assert chat["required"] == ["messages"]
    assert chat["properties"]["messages"]["minItems"] == 1
    assert find_body(document, "/v1/completions")["required"] == ["prompt"]
    assert find_body(document, "/detokenize")["required"] == ["tokens"]
    assert len(find_body(document, "/tokenize")["oneOf"]) == 2


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_limits_of_numbers_are_those_of_the_server(server, document, path, body):
    properties = find_body(document, path)["properties"]
    for name, limits in LIMITS.items():
        documented = [choice for choice in properties[name]["anyOf"] if choice["type"] != "null"]
        for kind, limit in limits.items():
            assert all(choice[kind] == limit for choice in documented)
            outside = server.post(path, body | {name: limit + STEP[kind]})
            assert (outside.status, outside.json["error"]["param"]) == (400, name)
            if kind != "exclusiveMinimum" and name != "min_tokens":
                assert server.post(path, body | {name: limit}).status == 200, (name, limit)


def test_a_prompt_is_described_by_each_of_its_forms(server, document):
    forms = find_body(document, "/v1/completions")["properties"]["prompt"]["anyOf"]
    assert {form["type"] for form in forms} == {"string", "array"}
    for form in forms:
        if form["type"] == "array":
            assert form["minItems"] == 1
    for prompt in ([], [[]], [-1], None):
        assert server.post("/v1/completions", COMPLETION | {"prompt": prompt}).status == 400


def test_the_document_can_be_kept_to_oneself():
    with running_server(disable_fastapi_docs=True) as server:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert server.get(path).status == 404
