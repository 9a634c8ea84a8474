"""docs/server.md and docs/metrics.md say what the code does."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.prompt import MAX_CACHE_SALT_LENGTH
from octavo.engine.template_renderer import MAX_TEXT_CHARACTERS
from octavo.entrypoints.cli import serve
from octavo.entrypoints.cli.parser import CommandParser
from octavo.entrypoints.file_limit import RESERVED_FILES
from octavo.entrypoints.http.body_limits import (
    MAX_BODY_BYTES,
    MAX_BODY_DEPTH,
    MAX_BODY_VALUES,
)
from octavo.entrypoints.http.connection import MAX_PIPELINED_REQUESTS, NUM_HEALTH_CONNECTIONS
from octavo.entrypoints.http.listener import KEEPALIVE_S, SEND_TIMEOUT_S
from octavo.entrypoints.http.reasons import REASON_OF_STATUS, STATUS_OF_REASON
from octavo.entrypoints.http.request_ids import MAX_ID_CHARACTERS
from octavo.entrypoints.openai.chat import ChatCompletionRequest
from octavo.entrypoints.openai.completions import CompletionRequest
from octavo.entrypoints.openai.fields import MAX_JSON_DEPTH
from octavo.entrypoints.openai.protocol import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_N,
)
from octavo.entrypoints.openai.server import RECEIVE_TIMEOUT_S
from octavo.entrypoints.openai.template_pool import (
    MEMORY_LIMIT_BYTES,
    NUM_PROCESSES,
    TIME_LIMIT_S,
)
from octavo.entrypoints.openai.tokenization import (
    CHARACTERS_PER_TOKEN,
    MIN_TEXT_LIMIT,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.entrypoints.openai.tokens import GenerateRequest
from octavo.entrypoints.server_settings import ServerSettings
from octavo.sampling_params import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_TEXT_LENGTH
from tests.echo_core import ECHO_INFO
from tests.live_server import running_server

DOCS = Path(__file__).parents[3] / "docs"
SERVER = (DOCS / "server.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
ENDPOINTS = {"chat": ChatCompletionRequest, "completions": CompletionRequest}


def read_table(text, heading):
    """Return the rows of the first table after a heading, cells without backticks."""
    section = text.split(f"\n{heading}\n", 1)[1]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    end = next((i for i, line in enumerate(lines) if i > 1 and line.startswith("|---")), None)
    rows = lines[2 : end - 1 if end else None]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_supported_field_is_in_the_table():
    rows = read_table(SERVER, "## Parameters")
    for column, body_type in ((1, ChatCompletionRequest), (2, CompletionRequest)):
        listed = {row[0].strip("`") for row in rows if row[column] == "yes"}
        assert listed == set(body_type.model_fields)


def test_every_field_of_tokenizing_is_in_its_table():
    rows = read_table(SERVER, "## Tokenizing")
    for column, body_type in ((1, TokenizeRequest), (2, DetokenizeRequest)):
        listed = {row[0].strip("`") for row in rows if row[column] == "yes"}
        assert listed == set(body_type.model_fields)
    sentence = SERVER.split("\n## Tokenizing\n")[1].split("are refused as in chat")[0]
    refused = sentence.rsplit("\n\n", 1)[1]
    assert set(re.findall(r"`(\w+)`", refused)) == set(TokenizeRequest.refused)
    assert f"{MIN_TEXT_LIMIT:,} characters, or {CHARACTERS_PER_TOKEN} for each" in SERVER


def test_every_refused_field_is_in_the_table_with_its_neutral_values():
    rows = read_table(SERVER, "### Refused")
    for column, body_type in ((1, ChatCompletionRequest), (2, CompletionRequest)):
        listed = {row[0].strip("`"): row[3] for row in rows if row[column] == "yes"}
        assert set(listed) == set(body_type.refused)
        for name, values in body_type.refused.items():
            assert all(f"`{json.dumps(value)}`" in listed[name] for value in values), name


def test_every_field_of_token_ids_is_in_its_table():
    rows = read_table(SERVER, "## Token ids")
    listed = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))
    assert sorted(listed) == sorted(GenerateRequest.model_fields)
    sentence = SERVER.split("\n## Token ids\n")[1].split(" are refused.")[0].rsplit("\n\n", 1)[1]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(GenerateRequest.refused)


def test_no_field_is_both_supported_and_refused():
    for body_type in ENDPOINTS.values():
        assert not set(body_type.refused) & set(body_type.model_fields)


def test_every_route_is_in_the_table(server):
    rows = read_table(SERVER, "## Endpoints")
    listed = {(row[0], path) for row in rows for path in re.findall(r"`(/[^`]*)`", row[1])}
    paths = server.get("/openapi.json").json["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    documents = {("GET", path) for path in ("/docs", "/redoc", "/openapi.json")}
    assert listed == routes | documents


def test_routes_that_are_said_to_be_missing_are(server):
    sentence = SERVER.split("Of vLLM's routes these are not here, and 404:")[1].split("\n\n")[0]
    paths = re.findall(r"`(/[^`]+)`", sentence)
    assert len(paths) > 8
    assert {server.post(path, {}).status for path in paths} == {404}


def test_every_reason_is_in_the_table_with_its_status():
    rows = read_table(SERVER, "### Reasons")
    assert {row[0].strip("`"): int(row[1]) for row in rows} == STATUS_OF_REASON
    assert {STATUS_OF_REASON[reason] for reason in REASON_OF_STATUS.values()} == set(
        REASON_OF_STATUS
    )


def test_every_admin_route_is_in_its_table():
    rows = read_table(SERVER, "## Administration")
    with running_server(has_admin=True) as server:
        paths = server.get("/openapi.json").json["paths"]
    marked = {
        (method.upper(), path)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "x-octavo-admin" in operation
    }
    assert {(row[0], row[1].strip("`")) for row in rows} == marked


LIMITS = {
    "n": MAX_N,
    "answers": MAX_CHOICES,
    "logprobs": MAX_LOGPROBS,
    "stop strings": MAX_STOP_STRINGS,
    "characters of a stop string": MAX_TEXT_LENGTH,
    "bad_words": MAX_BAD_WORDS,
    "characters of cache_salt": MAX_CACHE_SALT_LENGTH,
    "characters of a request's id": MAX_ID_CHARACTERS,
    "levels": MAX_JSON_DEPTH,
    "bytes": MAX_BODY_BYTES,
}


def test_limits_are_those_of_the_code():
    rows = read_table(SERVER, "### Limits")
    assert len(rows) == len(LIMITS)
    for (text, number), (name, limit) in zip(rows, LIMITS.items(), strict=True):
        assert text.replace("`", "").startswith(name)
        assert int(number.replace(",", "")) == limit


@pytest.mark.parametrize("kind", ["gauge", "counter", "histogram"])
def test_every_metric_is_documented_under_its_kind(server, kind):
    section = METRICS.split(f"\n## {kind.capitalize()}s\n")[1].split("\n##")[0]
    families = text_string_to_metric_families(server.get("/metrics").data.decode())
    suffix = "_total" if kind == "counter" else ""
    exported = {
        family.name + suffix
        for family in families
        if family.type == kind and not family.name.endswith("_created")
    }
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == exported


def test_the_buckets_are_those_of_the_document(server):
    bounds = {}
    for family in text_string_to_metric_families(server.get("/metrics").data.decode()):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name, []).append(float(sample.labels["le"]))
    documented = {}
    for text, names in read_table(METRICS, "### Buckets"):
        numbers = [float(word) for word in text.partition(" ...")[0].split()]
        if "max_model_len" in text:
            steps = [step * 10**power for power in range(5) for step in (1, 2, 5)]
            numbers = [step for step in steps if step <= ECHO_INFO.max_model_len]
        documented |= {name: [*numbers, float("inf")] for name in re.findall("`([^`]+)`", names)}
    assert {name: listed[: len(documented[name])] for name, listed in bounds.items()} == documented


def test_every_flag_in_the_documents_is_one_of_serve():
    parser = CommandParser(prog="octavo serve")
    serve.add_arguments(parser)
    named = set(re.findall(r"--[a-z][a-z0-9-]+", SERVER + OPERATIONS + METRICS)) - {"--flag"}
    assert named <= set(parser.options), named - set(parser.options)


def test_bounds_of_chat_templates_are_those_of_the_code():
    section = SERVER.split("\n### Chat templates\n")[1].split("\n## ")[0].replace("\n", " ")
    for value in (
        f"ended after {TIME_LIMIT_S:g} seconds",
        f"at {MAX_TEXT_CHARACTERS:,} characters",
        f"waited for {2 * TIME_LIMIT_S:g} seconds",
    ):
        assert value in section, value
    assert (MEMORY_LIMIT_BYTES, NUM_PROCESSES) == (2**30, 4)  # "a gigabyte", "Four"


def test_limits_of_the_door_are_those_of_the_code():
    section = OPERATIONS.split("\n## Limits of the door\n")[1].split("\n## ")[0]
    settings = ServerSettings()
    for value in (
        f"`--max-header-bytes` ({settings.max_header_bytes})",
        f"`--max-header-count` ({settings.max_header_count})",
        f"{MAX_BODY_BYTES // 2**20} MiB",
        f"{MAX_BODY_VALUES:,}",
        f"| {MAX_BODY_DEPTH} lists",
        f"| {RECEIVE_TIMEOUT_S:g} s |",
        f"| {SEND_TIMEOUT_S} s |",
        f"| {KEEPALIVE_S} s |",
        f"less {RESERVED_FILES}",
        f"the {NUM_HEALTH_CONNECTIONS + 1}rd beyond",
        f"| {MAX_PIPELINED_REQUESTS:,} | the connection is closed |",
    ):
        assert value in section, value
