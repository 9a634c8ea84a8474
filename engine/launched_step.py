"""Core process: a step between its plan and its update, and what the update made of it."""

from dataclasses import dataclass

from octavo.engine.request import Request
from octavo.executor.step import Step


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A planned step whose result is not known yet: column i belongs to ``requests[i]``."""

    step: Step
    requests: tuple[Request, ...]
    sampling: tuple[Request, ...]
    """Those that get a token, in the order of the result's."""


@dataclass(frozen=True, slots=True)
class UpdatedStep:
    """A step whose result has been applied; ``sampled`` is None where the token was dropped."""

    launched: LaunchedStep
    sampled: tuple[Request | None, ...]
    scored: tuple[Request, ...]
    """Requests without outputs that ended because this step computed the rest of their prompts."""
