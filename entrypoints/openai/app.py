"""The application: its routes and its OpenAPI document."""

import inspect
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

import octavo
from octavo.entrypoints.openai.chat import ChatEndpoint
from octavo.entrypoints.openai.completions import CompletionsEndpoint
from octavo.entrypoints.openai.errors import install_error_handlers
from octavo.entrypoints.openai.information import InformationEndpoints
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.openai.service import Service


def create_app(service: Service) -> FastAPI:
    """Build the application that serves one engine."""
    app = Application(title="Octavo", version=octavo.__version__)
    install_error_handlers(app)
    information = InformationEndpoints(service)
    for path, endpoint in (
        ("/health", information.health),
        ("/ready", information.ready),
        ("/version", information.version),
        ("/metrics", information.metrics),
        ("/v1/models", information.models),
        ("/v1/requests/{request_id}", information.explain),
    ):
        app.add_api_route(path, endpoint, methods=["GET"])
    chat, completions = ChatEndpoint(service), CompletionsEndpoint(service)
    for path, post, body_type in (
        ("/v1/chat/completions", chat.create, ChatCompletionRequest),
        ("/v1/completions", completions.create, CompletionRequest),
    ):
        # Not an API route: they read their bodies themselves, and FastAPI's way to an endpoint
        # takes as long as everything else before the prompt is encoded.
        app.add_route(path, post, methods=["POST"])
        app.generation_routes[path] = body_type
    return app


class Application(FastAPI):
    """A FastAPI application whose generation endpoints are plain routes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.generation_routes: dict[str, type[BaseModel]] = {}

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        for path, body_type in self.generation_routes.items():
            document["paths"][path] = {"post": _describe_post(body_type)}
        return document


def _describe_post(body_type: type[BaseModel]) -> dict[str, Any]:
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inline(schema, definitions)}}
    return {
        "summary": inspect.getdoc(body_type),
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "JSON, or server-sent events with stream"}},
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Put definitions in the place of references, which would point outside of the document."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
