"""When an answer is no answer but an error, and which."""

from typing import Any

from octavo.entrypoints.http.errors import describe_error
from octavo.entrypoints.http.reasons import STATUS_OF_REASON
from octavo.outputs import CompletionOutput


def find_failure(answer: CompletionOutput, *, is_complete: bool) -> dict[str, Any] | None:
    """Return the body of the error that an answer is, its ``code`` being the status; None if not.

    It is one too when it was aborted before it was ``is_complete``: before what it needs was there.
    """
    if answer.finish_reason == "error":
        reason_code = answer.reason_code or "generation_failed"
        status = STATUS_OF_REASON[reason_code]
        return describe_error(status, answer.error or "unknown error", reason_code=reason_code)
    if answer.finish_reason == "abort" and not is_complete:
        text = "the request was ended before its prompt was computed"
        return describe_error(503, text, reason_code="aborted")
    return None
