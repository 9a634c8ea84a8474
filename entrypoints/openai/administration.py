"""Routes for whoever runs a server: pause, resume, abort, drop the cache. Off by default."""

from collections.abc import Awaitable
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from octavo.entrypoints.http.errors import HttpError
from octavo.entrypoints.http.request_body import read_body
from octavo.entrypoints.openai.openapi import describe_body
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError

Result = TypeVar("Result")

ADMIN_MARK = {"x-octavo-admin": True}
"""Stands in the OpenAPI document at every route of this file, and at no other."""


class PauseOptions(BaseModel):
    """Parameters of /pause."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["keep", "abort"] = "keep"
    """Whether open requests go on after the pause, or end with ``abort`` when it begins."""
    clear_cache: bool = False
    """Also drop the cached blocks that no request uses."""


class NoOptions(BaseModel):
    """Parameters of a route that has none."""

    model_config = ConfigDict(extra="forbid")


class AbortBody(BaseModel):
    """Body of /abort_requests: the ids of responses, or all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    all: bool = False

    def check_choice(self) -> None:
        """Do nothing if one of the two is given.

        Raises:
            InvalidRequestError: none is, or both are.
        """
        if self.all is (self.request_ids is not None):
            raise InvalidRequestError(
                "give either request_ids or all, which must be true", parameter="request_ids"
            )


class Status(BaseModel):
    """What has been done."""

    status: Literal["paused", "resumed"]


class IsPaused(BaseModel):
    """Whether the engine is paused."""

    is_paused: bool


class DroppedCache(BaseModel):
    """How much of the prefix cache was dropped; what open requests use stays."""

    num_blocks_dropped: int


class AbortedRequests(BaseModel):
    """The ids of the requests that were ended, and of those that were not open."""

    aborted: list[str]
    unknown: list[str]


class AdminEndpoints:
    """Administers one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["administration"], dependencies=[Depends(_refuse_web_pages)])
        for method, path, endpoint, description in (
            ("POST", "/pause", self.pause, {}),
            ("POST", "/resume", self.resume, {}),
            ("GET", "/is_paused", self.is_paused, {}),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache, {}),
            ("POST", "/abort_requests", self.abort_requests, describe_body(AbortBody)),
        ):
            extra = ADMIN_MARK | description
            router.add_api_route(path, endpoint, methods=[method], openapi_extra=extra)
        return router

    async def pause(self, options: Annotated[PauseOptions, Query()]) -> Status:
        """Plan no step any more; answer when the last launched one has ended.

        Waiting requests keep their places, running ones their blocks. /ready is 503 meanwhile.
        """
        if self._service.is_draining:
            text = "the server is shutting down: it is not paused any more"
            raise HttpError(503, text, reason_code="shutting_down")
        await _confirm(self._engine.control.pause())
        if options.mode == "abort":
            self._engine.abort_all()
        if options.clear_cache:
            await _confirm(self._engine.control.reset_prefix_cache())
        return Status(status="paused")

    async def resume(self, options: Annotated[NoOptions, Query()]) -> Status:
        """End a pause; without one, change nothing."""
        await _confirm(self._engine.control.resume())
        return Status(status="resumed")

    async def is_paused(self, options: Annotated[NoOptions, Query()]) -> IsPaused:
        """Say whether the engine is paused."""
        return IsPaused(is_paused=self._engine.control.is_paused)

    async def reset_prefix_cache(self, options: Annotated[NoOptions, Query()]) -> DroppedCache:
        """Forget the K/V of earlier prompts, except what open requests use."""
        num_blocks = await _confirm(self._engine.control.reset_prefix_cache())
        return DroppedCache(num_blocks_dropped=num_blocks)

    async def abort_requests(self, request: Request) -> AbortedRequests:
        """End requests with ``abort``, waiting or running."""
        body = await read_body(request, AbortBody)
        body.check_choice()
        open_ids = self._engine.open_request_ids
        asked = open_ids if body.request_ids is None else list(dict.fromkeys(body.request_ids))
        known = set(open_ids)
        aborted = [request_id for request_id in asked if request_id in known]
        self._engine.abort(*aborted)
        return AbortedRequests(
            aborted=aborted,
            unknown=[request_id for request_id in asked if request_id not in known],
        )


async def _confirm(answer: Awaitable[Result]) -> Result:
    """Wait for the core's word that something is done."""
    try:
        return await answer
    except TimeoutError:
        raise HttpError(
            503, "the engine is in a long step: what was asked for is done when it ends"
        ) from None


def _refuse_web_pages(request: Request) -> None:
    """Keep out what a page sends from the browser of somebody who can reach the server."""
    if "origin" in request.headers:
        raise HttpError(403, "administration is not for web pages: send no Origin")
