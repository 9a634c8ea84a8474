"""GET routes: what the server is, whether it works, and its numbers."""

from typing import Any

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import octavo
from octavo.entrypoints.openai.errors import error_response
from octavo.entrypoints.openai.service import Service

STALL_LIMIT_S = 60.0
"""An engine whose open requests have seen no step for this long is not ready."""


class InformationEndpoints:
    """Answers questions about one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self) -> Response:
        """Say whether the engine lives: 200 or 503."""
        death = self._service.engine.death
        return Response() if death is None else error_response(503, f"the engine died: {death}")

    async def ready(self) -> Response:
        """Say whether new requests are admitted and open ones make progress: 200 or 503."""
        stalled_s = self._service.engine.stalled_s
        if self._service.is_draining:
            return error_response(503, "the server is shutting down")
        if stalled_s > STALL_LIMIT_S:
            return error_response(503, f"no step has ended for {stalled_s:.0f} s")
        return await self.health()

    async def version(self) -> dict[str, str]:
        """Say which version this is."""
        return {"version": octavo.__version__}

    async def models(self) -> dict[str, Any]:
        """List the names under which the model is served."""
        cards = [self._describe_model(name) for name in self._service.model_names]
        return {"object": "list", "data": cards}

    async def metrics(self) -> Response:
        """Return the numbers of the engine in Prometheus' text format."""
        text = generate_latest(self._service.engine.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _describe_model(self, name: str) -> dict[str, Any]:
        service = self._service
        permission = {
            "id": f"modelperm-{service.created:x}",
            "object": "model_permission",
            "created": service.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "octavo",
            "root": service.model.source.name,
            "parent": None,
            "max_model_len": service.engine.info.max_tokens_per_request,
            "permission": [permission],
        }
