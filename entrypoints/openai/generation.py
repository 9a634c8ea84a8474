"""One generation request from its admission to its response.

Whatever can be refused is refused before the first byte, so a stream fails with the same status
and body as a plain request.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.prompt import Prompt
from octavo.entrypoints.openai.errors import describe_failure
from octavo.entrypoints.openai.fields import report_ignored_fields
from octavo.entrypoints.openai.forms import ResponseForm, Usage
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.openai.streaming import ChunkWriter, EventStream, closed_on_disconnect
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A request that has been read and understood."""

    body: GenerationRequest
    prompt: Prompt
    params: SamplingParams
    form: ResponseForm
    model_name: str
    ignored_fields: Sequence[str]
    request_id: str

    @property
    def response_id(self) -> str:
        """The id of the response, by which the request can be looked up."""
        return f"{self.form.id_prefix}-{self.request_id}"

    async def respond(self, engine: AsyncEngine, receive: Receive) -> Response:
        """Admit the request and return its response.

        Raises what ``AsyncEngine.add`` raises.
        """
        stream = await engine.add(
            self.prompt,
            self.params,
            request_id=self.response_id,
            priority=self.body.priority or 0,
            timeout_s=self.body.timeout,
        )
        headers = report_ignored_fields(self.ignored_fields)
        if self.body.stream:
            head = self._describe(self.form.chunk_object_name)
            writer = ChunkWriter(head, self.form, has_usage=self.body.include_usage)
            return EventStream(stream, writer, headers)
        async with closed_on_disconnect(receive, stream):
            output = await anext(stream)  # the only one: its kind is FINAL_ONLY
        for answer in output.outputs:
            if answer.finish_reason == "error":
                failure = describe_failure(answer)
                return _json_response(failure, headers, status=failure["error"]["code"])
        whole = self._describe(self.form.object_name) | self._describe_whole(output)
        return _json_response(whole, headers)

    def _describe(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": int(time.time()),
            "model": self.model_name,
        }

    def _describe_whole(self, output: RequestOutput) -> dict[str, Any]:
        usage = Usage()
        usage.add(output)
        choices = [
            {
                "index": answer.index,
                **self.form.content(answer.text),
                "logprobs": self.form.logprobs(answer),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for answer in output.outputs
        ]
        return {"choices": choices, "usage": usage.describe()}


def _json_response(body: dict[str, Any], headers: dict[str, str], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
