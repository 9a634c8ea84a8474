"""The application: its routes and its OpenAPI document."""

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
    app = FastAPI(title="Octavo", version=octavo.__version__)
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
        app.add_api_route(path, post, methods=["POST"], openapi_extra=_describe_body(body_type))
    return app


def _describe_body(body_type: type[BaseModel]) -> dict[str, Any]:
    """Describe a body for the OpenAPI document; the endpoints read it themselves."""
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Put definitions in the place of references, which would point outside of the document."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
