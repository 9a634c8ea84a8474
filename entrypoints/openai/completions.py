"""POST /v1/completions: JSON to a prompt and ``SamplingParams``."""

from typing import Any

from fastapi import Request, Response

from octavo.engine.prompt import Prompt
from octavo.entrypoints.openai.forms import CompletionForm
from octavo.entrypoints.openai.generation import Generation
from octavo.entrypoints.openai.protocol import CompletionRequest
from octavo.entrypoints.openai.request_body import read_body
from octavo.entrypoints.openai.request_ids import choose_request_id
from octavo.entrypoints.openai.service import Service
from octavo.errors import InvalidRequestError


class CompletionsEndpoint:
    """Continues prompts with one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Continue one prompt.

        Raises:
            InvalidRequestError: the request cannot be served as written.
            HttpError: there is no such model, or the server is ending.
        """
        body = await read_body(request, CompletionRequest)
        service = self._service
        generation = Generation(
            request_id=choose_request_id(request, body.request_id),
            model_name=service.choose_model(body.model),
            ignored_fields=body.check_fields(),
            params=body.to_sampling_params(service.model.sampling_defaults),
            prompt=_read_prompt(body),
            form=CompletionForm(body.num_logprobs),
            body=body,
        )
        return await generation.respond(service.engine, request.receive)


def _read_prompt(body: CompletionRequest) -> Prompt:
    """Return the one prompt, which may stand alone or in a list."""
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequestError(
                f"prompt is a list of {len(prompt)} prompts; this version takes one for a request",
                parameter="prompt",
            )
        (prompt,) = prompt
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequestError(
            "prompt is missing or empty; it must be a text or a list of token ids",
            parameter="prompt",
        )
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": body.cache_salt}
    return {"prompt_token_ids": prompt, "cache_salt": body.cache_salt}
