"""Every error that Octavo raises on purpose.

OctavoError
├── InvalidRequestError   the request cannot be served as written (a ValueError; HTTP 400)
│   └── BatchRefusedError some requests of one ``LLM.generate`` call were refused
├── ConfigError           a setting or a model that cannot be used (a ValueError; exit status 2)
│   └── ModelLoadError    a checkpoint is missing, incomplete or of the wrong shape
├── QueueFullError        the queue caps are reached; try again later (HTTP 429)
└── EngineDeadError       the engine broke an invariant or its process died; no more answers
"""

from collections.abc import Sequence


class OctavoError(Exception):
    """Base of all errors of this package."""


class InvalidRequestError(OctavoError, ValueError):
    """Refuse a request before admission.

    ``parameter`` is the name of the offending field as the client wrote it, or None when it is the
    request as a whole; ``reason_code`` is the kind of refusal in a word that does not change.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, reason_code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.reason_code = reason_code


class BatchRefusedError(InvalidRequestError):
    """Report refused requests of one call after the others have run.

    ``outputs`` has one entry per prompt of the call: its final output, or None where refused.
    """

    def __init__(self, message: str, *, outputs: Sequence[object]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class ConfigError(OctavoError, ValueError):
    """Refuse to start with a setting or a model that cannot be used."""


class ModelLoadError(ConfigError):
    """Refuse to start from a checkpoint that is missing, incomplete or of the wrong shape."""


class QueueFullError(OctavoError):
    """Refuse a request because the waiting queue is at its cap."""

    def __init__(self, message: str, *, reason_code: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason_code = reason_code
        self.retry_after_s = retry_after_s


class EngineDeadError(OctavoError):
    """The engine cannot answer any more; the message says why."""
