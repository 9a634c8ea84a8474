"""GET /v1/models and /v1/models/{model_id}: the names under which a model is served."""

from typing import Any

from octavo.entrypoints.openai.service import Service


class ModelEndpoints:
    """Describes the model of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list_models(self) -> dict[str, Any]:
        """List the names under which the model is served."""
        cards = [self._describe(name) for name in self._service.model_names]
        return {"object": "list", "data": cards}

    async def retrieve_model(self, model_id: str) -> dict[str, Any]:
        """Describe the model by one of its names."""
        self._service.check_model(model_id)
        return self._describe(model_id)

    def _describe(self, name: str) -> dict[str, Any]:
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
