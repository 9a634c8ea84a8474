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
    stall_timeout_s: float = 60.0
    """An engine that owes answers and has ended no step for this long is not ready."""

    def __post_init__(self) -> None:
        for name in ("request_timeout", "stall_timeout"):
            seconds = getattr(self, f"{name}_s")
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} is {seconds}; it must be seconds greater than 0")


NO_LIMITS = ServingLimits()
