"""API process: what a front end decides about all of its requests."""

import math
from dataclasses import dataclass

from octavo.engine.door import NO_CAPS, QueueCaps
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """How much may wait and how long things may take.

    Raises:
        ConfigError: a time is not a number of seconds greater than 0.
    """

    queue_caps: QueueCaps = NO_CAPS
    request_timeout_s: float | None = None
    """Time of a request that does not set its own; None is no limit."""

    def __post_init__(self) -> None:
        seconds = self.request_timeout_s
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigError(f"request_timeout is {seconds}; it must be greater than 0")


NO_LIMITS = ServingLimits()
