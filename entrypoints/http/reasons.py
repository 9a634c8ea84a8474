"""The kinds of refusals and failures, in words that do not change: ``reason_code`` of an error."""

STATUS_OF_REASON = {
    "invalid_value": 400,
    "invalid_json": 400,
    "invalid_http": 400,
    "unsupported_parameter": 400,
    "prompt_too_long": 400,
    "no_token_left": 400,
    "chat_template_failed": 400,
    "chat_template_too_slow": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "model_not_found": 404,
    "request_not_found": 404,
    "method_not_allowed": 405,
    "request_too_slow": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full_requests": 429,
    "queue_full_tokens": 429,
    "headers_too_large": 431,
    "internal_error": 500,
    "generation_failed": 500,
    "aborted": 503,
    "busy": 503,
    "engine_dead": 503,
    "paused": 503,
    "shutting_down": 503,
    "stalled": 503,
    "too_many_connections": 503,
    "request_timeout": 504,
}
"""Reason -> the status of a response that fails for it."""

REASON_OF_STATUS = {
    400: "invalid_value",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    500: "internal_error",
    503: "busy",
}
"""What is said where nobody knows anything narrower."""


def choose_reason(status: int, reason_code: str | None) -> str:
    """Return the reason that was given, or the one that every error of this status has."""
    if reason_code is not None:
        return reason_code
    return REASON_OF_STATUS.get(status, "internal_error" if status >= 500 else "invalid_value")
