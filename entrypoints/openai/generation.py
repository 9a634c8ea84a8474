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

from octavo.engine.conditions import Conditions
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.request_stream import RequestStream
from octavo.entrypoints.http.errors import choose_retry
from octavo.entrypoints.openai.chunk_writer import ChunkWriter
from octavo.entrypoints.openai.failures import find_failure
from octavo.entrypoints.openai.fields import report_ignored_fields
from octavo.entrypoints.openai.forms import Choice, ResponseForm
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.openai.service import Service
from octavo.entrypoints.openai.streaming import (
    MANY_SCORED_TOKENS,
    EventStream,
    closed_on_disconnect,
)
from octavo.entrypoints.openai.usage import Usage
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


@dataclass(kw_only=True, slots=True)
class Asked:
    """What a client asks for, read and encoded; nothing of it has been admitted."""

    body: GenerationRequest
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    model_name: str
    ignored_fields: list[str]
    request_id: str
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers what was asked, in the form of one endpoint."""

    asked: Asked
    form: ResponseForm

    @property
    def response_id(self) -> str:
        """The id of the response, by which the request can be looked up."""
        prefix, request_id = self.form.id_prefix, self.asked.request_id
        return f"{prefix}-{request_id}" if prefix else request_id

    async def respond(self, service: Service, receive: Receive) -> Response:
        """Admit the request and return its response.

        Raises what ``AsyncEngine.add`` raises.
        """
        conditions = Conditions(
            request_id=self.response_id,
            priority=self.asked.body.priority or 0,
            timeout_s=self.asked.body.timeout,
            arrival_s=self.asked.arrival_s,
        )
        service.check_admission()  # it may have begun to end while the prompt was read
        stream = await service.engine.add(self.asked.prompts, self.asked.params, conditions)
        headers = report_ignored_fields(self.asked.ignored_fields)
        if self.asked.body.stream:
            keep_alive_s = service.keep_alive_s
            return EventStream(stream, self._create_writer(), headers, keep_alive_s=keep_alive_s)
        async with closed_on_disconnect(receive, stream):
            failure, outputs = await self._collect(stream)
        if failure is not None:
            status = failure["error"]["code"]
            return _json_response(failure, headers | choose_retry(status), status=status)
        if self._num_scored_tokens <= MANY_SCORED_TOKENS:
            return _json_response(self._describe_whole(outputs), headers)
        return await service.engine.prompts.run(
            lambda: _json_response(self._describe_whole(outputs), headers)
        )

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.asked.prompts)

    @property
    def _num_scored_tokens(self) -> int:
        return 0 if self.asked.params.prompt_logprobs is None else self._num_prompt_tokens

    def _create_writer(self) -> ChunkWriter:
        return ChunkWriter(
            self._describe(self.form.chunk_object_name),
            self.form,
            Usage(self._num_prompt_tokens),
            reports=self.asked.body.usage_reports,
            params=self.asked.params,
            num_prompts=len(self.asked.prompts),
        )

    async def _collect(
        self, stream: RequestStream
    ) -> tuple[dict[str, Any] | None, list[RequestOutput]]:
        """Return the outputs in the order of the prompts, or the first failure."""
        outputs = {}
        async for place, output in stream:  # one for each prompt: their kind is FINAL_ONLY
            outputs[place] = output
            has_scores = not self._num_scored_tokens or output.prompt_logprobs is not None
            for answer in output.outputs:
                failure = find_failure(answer, is_complete=has_scores)
                if failure is not None:
                    return failure, []
        return None, [outputs[place] for place in range(len(self.asked.prompts))]

    def _describe(self, object_name: str) -> dict[str, Any]:
        return {
            self.form.id_name: self.response_id,
            "object": object_name,
            "created": int(time.time()),
            "model": self.asked.model_name,
        }

    def _describe_whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        usage = Usage(self._num_prompt_tokens)
        choices = []
        for place, output in enumerate(outputs):
            usage.note_prompt(place, output)
            for answer in output.outputs:
                usage.add(answer)
                choice = Choice(place * self.asked.params.n + answer.index, place)
                choices.append(
                    {
                        "index": choice.index,
                        **self.form.describe_choice(choice, output, answer),
                        "finish_reason": answer.finish_reason,
                        "stop_reason": answer.stop_reason,
                    }
                )
        return {
            **self._describe(self.form.object_name),
            "choices": choices,
            "usage": usage.describe(),
            **self.form.describe_prompts(outputs),
        }


def _json_response(body: dict[str, Any], headers: dict[str, str], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
