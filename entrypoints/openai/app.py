"""The application and its routes."""

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

import octavo
from octavo.entrypoints.http.errors import install_error_handlers
from octavo.entrypoints.openai.administration import AdminEndpoints
from octavo.entrypoints.openai.chat import ChatCompletionRequest, ChatEndpoint
from octavo.entrypoints.openai.completions import CompletionRequest, CompletionsEndpoint
from octavo.entrypoints.openai.information import InformationEndpoints
from octavo.entrypoints.openai.model_cards import ModelEndpoints
from octavo.entrypoints.openai.openapi import (
    Application,
    describe_body,
    describe_check,
    describe_generation,
    describe_rendering,
)
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.openai.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizationEndpoints,
    TokenizeAnswer,
    TokenizeRequest,
)
from octavo.entrypoints.openai.tokens import GenerateRequest, TokensEndpoint


def create_app(service: Service, *, has_documents: bool = True) -> FastAPI:
    """Build the application that serves one engine."""
    documents = {} if has_documents else dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = Application(title="Octavo", version=octavo.__version__, **documents)
    install_error_handlers(app)
    _add_generation(app, service)  # first: routes are tried in turn
    _add_information(app, InformationEndpoints(service), ModelEndpoints(service))
    _add_tokenization(app, TokenizationEndpoints(service))
    if service.has_admin_endpoints:
        app.include_router(AdminEndpoints(service).router())
    return app


def _add_generation(app: Application, service: Service) -> None:
    """Add the routes that run a model, or tell what would be run.

    Not as API routes: they read their bodies themselves, and FastAPI's way to an endpoint takes as
    long as everything else before the prompt is encoded.
    """
    chat, completions = ChatEndpoint(service), CompletionsEndpoint(service)
    tokens = TokensEndpoint(service, chat, completions)
    for path, post, operation in (
        (
            "/v1/chat/completions",
            chat.create,
            describe_generation(ChatCompletionRequest, ("id", "message")),
        ),
        (
            "/v1/completions",
            completions.create,
            describe_generation(CompletionRequest, ("id", "text")),
        ),
        (
            "/inference/v1/generate",
            tokens.generate,
            describe_generation(GenerateRequest, ("request_id", "token_ids")),
        ),
        (
            "/v1/chat/completions/render",
            tokens.render_chat,
            describe_rendering(ChatCompletionRequest, is_list=False),
        ),
        (
            "/v1/completions/render",
            tokens.render_completion,
            describe_rendering(CompletionRequest, is_list=True),
        ),
    ):
        app.add_route(path, post, methods=["POST"])
        app.describe_route("POST", path, operation)


def _add_information(
    app: Application, information: InformationEndpoints, models: ModelEndpoints
) -> None:
    """Add the routes that read; those with a response class say nothing in JSON but errors."""
    for path, endpoint in (
        ("/version", information.version),
        ("/load", information.load),
        ("/server_info", information.server_info),
        ("/v1/models", models.list_models),
        ("/v1/models/{model_id:path}", models.retrieve_model),
        ("/v1/requests/{request_id}", information.explain),
    ):
        app.add_api_route(path, endpoint, methods=["GET"])
    for path, check in (("/health", information.health), ("/ready", information.ready)):
        app.add_api_route(path, check, methods=["GET"], response_class=Response)
    app.add_route("/ping", information.ping, methods=["GET", "POST"])
    for method in ("GET", "POST"):
        app.describe_route(method, "/ping", describe_check())
    app.add_api_route(
        "/metrics", information.metrics, methods=["GET"], response_class=PlainTextResponse
    )


def _add_tokenization(app: Application, tokenization: TokenizationEndpoints) -> None:
    for path, post, body_type, answer_type in (
        ("/tokenize", tokenization.tokenize, TokenizeRequest, TokenizeAnswer),
        ("/detokenize", tokenization.detokenize, DetokenizeRequest, DetokenizeAnswer),
    ):
        app.add_api_route(
            path,
            post,
            methods=["POST"],
            responses={200: {"model": answer_type}},
            openapi_extra=describe_body(body_type),
        )
