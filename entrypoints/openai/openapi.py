"""The OpenAPI document: what FastAPI finds out by itself, and what it has to be told.

Endpoints that read their own bodies are described here, and every operation's errors.
"""

import inspect
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

JSON = "application/json"
EVENTS = "text/event-stream"
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


class Application(FastAPI):
    """A FastAPI application whose document also knows of plain routes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._described: dict[str, dict[str, Any]] = {}

    def describe_route(self, path: str, operation: dict[str, Any]) -> None:
        """Put a POST route that is none of FastAPI's into the document."""
        self._described[path] = {"post": operation}

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


def describe_generation(body_type: type[BaseModel], content: str) -> dict[str, Any]:
    """Return the operation of a generation endpoint, which answers with JSON or with events.

    ``content`` is the member of a choice that carries the answer.
    """
    choice = _describe_object("index", content, "logprobs", "finish_reason", "stop_reason")
    answer = _describe_object("id", "object", "created", "model", "choices", "usage")
    answer["properties"] = {"choices": {"type": "array", "items": choice, "minItems": 1}}
    response = _describe_response("JSON, or server-sent events with stream.", answer)
    response["content"][EVENTS] = {"schema": {"type": "string"}}
    return {
        "summary": inspect.getdoc(body_type),
        **describe_body(body_type),
        "responses": {"200": response},
    }


def describe_body(body_type: type[BaseModel]) -> dict[str, Any]:
    """Return the part of an operation that says what JSON it takes."""
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {JSON: {"schema": _inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


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
