"""Every failure as a response in OpenAI's form: ``{"error": {message, type, param, code}}``.

A ``reason_code`` stands beside these; ``reasons`` lists them.
"""

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo.entrypoints.http.reasons import choose_reason
from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError, QueueFullError

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
MAX_SHOWN_INPUT = 80
MAX_MESSAGE_LENGTH = 1_000
"""Characters of a message: what it repeats of a request may have any length."""
OMISSION = " ... "
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status: the client is gone. It is for the log."""


class HttpError(OctavoError):
    """Refuse a request with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        reason_code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.reason_code = reason_code


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a route with a JSON error."""
    app.add_exception_handler(HttpError, _answer_http_error)
    app.add_exception_handler(InvalidRequestError, _answer_invalid_request)
    app.add_exception_handler(RequestValidationError, _answer_invalid_parameter)
    app.add_exception_handler(QueueFullError, _answer_queue_full)
    app.add_exception_handler(EngineDeadError, _answer_engine_dead)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_bug)


def describe_error(
    status: int, message: str, *, parameter: str | None = None, reason_code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error."""
    error = {
        "message": _shorten(message),
        "type": ERROR_TYPES.get(status, "HTTPError"),
        "param": parameter,
        "code": status,
        "reason_code": choose_reason(status, reason_code),
    }
    return {"error": error}


def _shorten(message: str) -> str:
    """Take out the middle of a long message: its beginning says what it is about, its end why."""
    half = (MAX_MESSAGE_LENGTH - len(OMISSION)) // 2
    if len(message) <= MAX_MESSAGE_LENGTH:
        return message
    return message[:half] + OMISSION + message[-half:]


def choose_retry(status: int) -> dict[str, str]:
    """Return the header that says when to come back, for a status that does not last."""
    return {"retry-after": "1"} if status == 503 else {}


def error_response(
    status: int,
    message: str,
    *,
    parameter: str | None = None,
    reason_code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a response that carries an error."""
    body = describe_error(status, message, parameter=parameter, reason_code=reason_code)
    headers = choose_retry(status) | (headers or {})
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(
        error.status, error.message, parameter=error.parameter, reason_code=error.reason_code
    )


async def _answer_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequestError)
    return error_response(
        400, error.message, parameter=error.parameter, reason_code=error.reason_code
    )


async def _answer_invalid_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:]))  # behind the part of the request that it is in
    shown = repr(first["input"])[:MAX_SHOWN_INPUT]
    return error_response(400, f"{name} is {shown}: {first['msg']}", parameter=name)


async def _answer_queue_full(_: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError)
    retry_after = {"retry-after": str(max(1, round(error.retry_after_s)))}
    return error_response(429, str(error), reason_code=error.reason_code, headers=retry_after)


async def _answer_engine_dead(_: Request, error: Exception) -> Response:
    return error_response(503, f"the engine has died: {error}", reason_code="engine_dead")


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return error_response(error.status_code, str(error.detail), headers=headers)


async def _answer_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_bug(_: Request, error: Exception) -> Response:
    # The exception goes on to the HTTP server, which logs it.
    return error_response(500, "the server made a mistake; its log says which")
