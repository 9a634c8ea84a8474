"""GET routes: what the server is, whether it works, and its numbers."""

from typing import Annotated, Any

import msgspec
from fastapi import Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

import octavo
from octavo.engine.messages import RequestExplanation
from octavo.engine.open_request import InFlight
from octavo.entrypoints.http.errors import HttpError, error_response
from octavo.entrypoints.openai.service import Service
from octavo.shown_settings import show_settings


class LoadOptions(BaseModel):
    """Parameters of /load."""

    model_config = ConfigDict(extra="forbid")

    include_inflight: bool = False
    """List the open requests, the oldest first."""
    inflight_limit: int = Field(100, ge=1, le=1_000)
    """How many of them at most."""


class InformationEndpoints:
    """Answers questions about one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self) -> Response:
        """Say whether the engine lives: 200 or 503."""
        death = self._service.engine.death
        return Response() if death is None else _say_dead(death)

    async def ping(self, _: Request) -> Response:
        """Say what ``health`` says, under the name that SageMaker asks for."""
        return await self.health()

    async def ready(self) -> Response:
        """Say whether new requests are admitted and open ones make progress: 200 or 503."""
        if self._service.is_draining:
            text = "the server is shutting down"
            return error_response(503, text, reason_code="shutting_down")
        engine = self._service.engine
        if engine.control.is_paused:
            return error_response(503, "the engine is paused", reason_code="paused")
        if (stall := engine.stall) is not None:
            return error_response(503, stall, reason_code="stalled")
        return await self.health()

    async def explain(self, request_id: str) -> Response:
        """Tell the state of a request by the id of its response, while it lives and after."""
        engine = self._service.engine
        try:
            entries = await engine.explain(request_id)
        except TimeoutError:
            text = engine.stall or "the engine is in a long step: ask again"
            raise HttpError(503, text, reason_code="stalled" if engine.stall else "busy") from None
        if not entries:
            text = f"request {request_id!r} is not known, or ended long ago"
            raise HttpError(404, text, reason_code="request_not_found")
        body = {"object": "list", "data": [_describe_explanation(entry) for entry in entries]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def version(self) -> dict[str, str]:
        """Say which version this is."""
        return {"version": octavo.__version__}

    async def load(self, options: Annotated[LoadOptions, Query()]) -> dict[str, Any]:
        """Say how many requests are open, and on request which."""
        engine = self._service.engine
        load: dict[str, Any] = {"server_load": len(engine.open_request_ids)}
        if options.include_inflight:
            entries = engine.list_open(options.inflight_limit)
            load["inflight"] = [_describe_in_flight(entry) for entry in entries]
        return load

    async def server_info(self) -> dict[str, Any]:
        """Tell the settings of server and engine, without what may be secret."""
        service = self._service
        info: dict[str, Any] = msgspec.to_builtins(service.engine.info)
        del info["type"]
        return {
            "version": octavo.__version__,
            "model_names": list(service.model_names),
            "root": service.model.source.name,
            "engine_settings": info.pop("settings"),
            "server_settings": show_settings(service.settings),
            "limits": info,
        }

    async def metrics(self) -> Response:
        """Return the numbers of the engine in Prometheus' text format."""
        text = generate_latest(self._service.engine.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _say_dead(death: str) -> Response:
    return error_response(503, f"the engine died: {death}", reason_code="engine_dead")


def _describe_explanation(entry: RequestExplanation) -> dict[str, Any]:
    """Return the entry with durations in the place of times."""
    facts: dict[str, Any] = msgspec.to_builtins(entry)
    arrival, scheduled = facts.pop("arrival_s"), facts.pop("first_scheduled_s")
    first_token, ended = facts.pop("first_token_s"), facts.pop("ended_s")
    facts["queue_s"] = _subtract(scheduled, arrival)
    facts["prefill_s"] = _subtract(first_token, scheduled)
    facts["decode_s"] = _subtract(ended, first_token)
    facts["deliver_s"] = _subtract(facts.pop("delivered_s"), ended)
    return facts


def _describe_in_flight(entry: InFlight) -> dict[str, Any]:
    return {
        "id": entry.request_id,
        "state": "running" if entry.is_started else "waiting",
        "age_s": round(entry.age_s, 3),
        "n": entry.num_answers,
        "prompt_tokens": entry.num_prompt_tokens,
        "cached_tokens": entry.num_cached_tokens,
        "completion_tokens": entry.num_output_tokens,
    }


def _subtract(end: float | None, start: float | None) -> float | None:
    # An end before the start is a client that was told before the core had ended its request.
    return None if end is None or start is None else max(0.0, end - start)
