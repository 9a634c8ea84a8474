"""The OpenAPI document: what FastAPI finds out by itself, and what it has to be told.

Endpoints that read their own bodies are described here, and every operation's errors.
"""

import inspect
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

JSON = "application/json"
EVENTS = "text/event-stream"
EMPTY = {"description": "No content."}
NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": NULLABLE_TEXT,
                "code": {"type": "integer", "description": "The status."},
                "reason_code": {"type": "string", "description": "The reason, for programs."},
            },
        }
    },
}
"""What every response but the ones of the document is; see ``errors``."""
LIMITS: dict[str, dict[str, float]] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "min_tokens": {"minimum": 0},
}
"""Of fields that are checked where their values are used."""
CONTENT_PART = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        },
    ]
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": CONTENT_PART},
                    {"type": "null"},
                ]
            },
        },
    },
}


class Application(FastAPI):
    """A FastAPI application that answers HEAD, and whose document also knows of plain routes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._described: dict[str, dict[str, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer HEAD as if it were GET: the HTTP server leaves the body out."""
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)

    def describe_route(self, method: str, path: str, operation: dict[str, Any]) -> None:
        """Put a route that is none of FastAPI's into the document."""
        self._described.setdefault(path, {})[method.lower()] = operation

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        document["paths"].update(self._described)
        for operations in document["paths"].values():
            for operation in operations.values():
                # FastAPI expects its own form of 422 where it reads parameters: ours is 400.
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = _describe_response("An error.", ERROR)
        return document


def describe_generation(body_type: type[BaseModel], members: tuple[str, str]) -> dict[str, Any]:
    """Return the operation of a generation endpoint, which answers with JSON or with events.

    ``members`` are the one that carries the id, and the one of a choice that carries the answer.
    """
    id_name, content = members
    choice = _describe_object("index", content, "logprobs", "finish_reason", "stop_reason")
    answer = _describe_object(id_name, "object", "created", "model", "choices", "usage")
    answer["properties"] = {"choices": {"type": "array", "items": choice, "minItems": 1}}
    response = _describe_response("JSON, or server-sent events with stream.", answer)
    response["content"][EVENTS] = {}  # a schema would be that of one event, not of its JSON
    return {
        "summary": inspect.getdoc(body_type),
        **describe_body(body_type),
        "responses": {"200": response},
    }


def describe_rendering(body_type: type[BaseModel], *, is_list: bool) -> dict[str, Any]:
    """Return the operation of an endpoint that tells which token ids a request is."""
    rendered = _describe_object("request_id", "token_ids", "sampling_params", "model")
    schema = {"type": "array", "items": rendered, "minItems": 1} if is_list else rendered
    return {
        "summary": "Tell which token ids a request is, in the form of /inference/v1/generate.",
        **describe_body(body_type),
        "responses": {"200": _describe_response("What would be run.", schema)},
    }


@cache
def describe_body(body_type: type[BaseModel]) -> dict[str, Any]:
    """Return the part of an operation that says what JSON it takes; several operations share it."""
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    schema = _inline(schema, definitions)
    for name, limits in LIMITS.items():
        for choice in schema["properties"].get(name, {}).get("anyOf", ()):
            if choice["type"] != "null":
                choice.update(limits)
    if "messages" in schema["properties"]:
        _describe_messages(schema["properties"]["messages"])
    elif "prompt" in schema["properties"]:
        schema["required"] = ["prompt"]
        _describe_prompt(schema["properties"]["prompt"])
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def describe_check() -> dict[str, Any]:
    """Return an operation that answers 200 and says nothing."""
    return {"summary": "Say whether the engine lives.", "responses": {"200": EMPTY}}


def _describe_messages(schema: dict[str, Any]) -> None:
    """Say of what form messages are, wherever they may be left out or not."""
    schema.update({"anyOf": [MESSAGES, {"type": "null"}]} if "anyOf" in schema else MESSAGES)


def _describe_prompt(schema: dict[str, Any]) -> None:
    """Say that a prompt is there and is not empty, whatever its form."""
    schema["anyOf"] = [choice for choice in schema["anyOf"] if choice["type"] != "null"]
    for choice in schema["anyOf"]:
        while choice["type"] == "array":
            choice["minItems"] = 1
            choice = choice["items"]
        if choice["type"] == "integer":
            choice["minimum"] = 0
    schema.pop("default", None)


def _describe_response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _describe_object(*required: str) -> dict[str, Any]:
    return {"type": "object", "required": list(required)}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Put definitions in the place of references, which would point outside of the document."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
