"""Every setting of ``octavo serve`` besides the engine's, with its default and meaning.

The command line, its help and ``docs/configuration.md`` are made from this file; it loads nothing
heavy. What a setting does is decided where it is used.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError


def setting(default: Any, help_text: str, *, group: str, choices: tuple[Any, ...] = ()) -> Any:
    """Declare a field; ``group`` is the section of the help in which it stands."""
    return field(default=default, metadata={"help": help_text, "group": group, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Settings of one server.

    A tuple is given as several values or as a JSON list.

    Raises:
        ConfigError: a value is outside its range; the message names the setting and what is
            allowed.
    """

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 is every network of this machine.",
        group="Network",
    )
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", group="Network")
    served_model_name: tuple[str, ...] = setting(
        (), "Names of the model in the API, the first also in metrics; none is MODEL.", group="API"
    )
    max_queued_requests: int | None = setting(
        None, "Answer 429 instead of letting more requests wait; None is no limit.", group="Limits"
    )
    max_queued_tokens: int | None = setting(
        None,
        "Answer 429 instead of letting more prompt tokens wait; None is no limit.",
        group="Limits",
    )
    request_timeout: float | None = setting(
        None,
        "Seconds after which requests end that set no timeout of their own; None is no limit.",
        group="Limits",
    )
    stall_timeout: float = setting(
        60.0,
        "Seconds without the end of a step, with requests open, after which the server is not "
        "ready.",
        group="Limits",
    )
    shutdown_timeout: float = setting(
        0.0,
        "Seconds that open requests may go on after SIGTERM before they are aborted.",
        group="Limits",
    )
    access_log: bool = setting(True, "Log a line for each HTTP request.", group="Log")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("request_timeout", "stall_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} is {seconds}; it must be seconds greater than 0")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout}; it must be a number of seconds"
            )
