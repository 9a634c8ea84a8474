"""API process: what a client's request says besides its prompts and sampling parameters."""

import math
import time
from dataclasses import dataclass, field

from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which name, how urgently and how long a request is worked on.

    Raises:
        InvalidRequestError: the time is not a number of seconds greater than 0.
    """

    request_id: str | None = None
    """None is a random one; one that an open request has gets a suffix."""
    priority: int = 0
    timeout_s: float | None = None
    """After this time it ends with ``error``, waiting or running; None is the engine's limit."""
    arrival_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidRequestError(
                f"timeout is {self.timeout_s}; it must be a number of seconds greater than 0",
                parameter="timeout",
            )
