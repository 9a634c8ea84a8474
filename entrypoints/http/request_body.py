"""Reads the JSON body of a request; whatever is wrong with it is the client's error, named."""

from reprlib import Repr
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from octavo.entrypoints.http.body_limits import (
    MAX_BODY_BYTES,
    check_declared_size,
    check_num_values,
    refuse_size,
)
from octavo.entrypoints.http.errors import MAX_SHOWN_INPUT, HttpError
from octavo.errors import InvalidRequestError

Body = TypeVar("Body", bound=BaseModel)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_INPUT


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """Return the validated body.

    Raises:
        InvalidRequestError: it is not JSON, or not what the endpoint takes.
        HttpError: it is not sent as plain JSON (415), or is too large (413).
    """
    _check_content_type(request.headers.get("content-type", ""))
    _check_content_coding(request.headers.get("content-encoding", "identity"))
    check_declared_size(request.headers.get("content-length"))
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise refuse_size()
    check_num_values(data)
    try:
        return body_type.model_validate_json(data)
    except ValidationError as error:
        raise describe_invalid(error) from None


def _check_content_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HttpError(
            415, f"the content type is {media_type or 'missing'}; send application/json"
        )


def _check_content_coding(coding: str) -> None:
    if coding.strip().lower() != "identity":
        raise HttpError(415, f"the content encoding is {coding[:80]}; send the body as it is")


def describe_invalid(error: ValidationError) -> InvalidRequestError:
    """Return the refusal of a value: the first of all that are wrong."""
    first: Any = error.errors(include_url=False, include_context=False)[0]
    location = first["loc"]
    if not location:
        text = f"the body cannot be read: {first['msg']}"
        return InvalidRequestError(text, reason_code="invalid_json")
    shown = _SHORT.repr(first["input"])[:MAX_SHOWN_INPUT]
    path = ".".join(map(str, location))
    return InvalidRequestError(f"{path} is {shown}: {first['msg']}", parameter=str(location[0]))
