"""Token counts of a response."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from octavo.outputs import CompletionOutput, RequestOutput


class UsageReports(Enum):
    """Where a stream says its usage."""

    NOWHERE = 0
    AT_THE_END = 1
    IN_EVERY_CHUNK = 2
    """What has been counted so far, and at the end."""


@dataclass(slots=True)
class Usage:
    """Counts of one response over all its prompts and answers."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    _num_cached_tokens: dict[int, int] = field(default_factory=dict)

    def note_prompt(self, prompt: int, output: RequestOutput) -> None:
        """Note how much of a prompt came from the cache."""
        self._num_cached_tokens[prompt] = output.num_cached_tokens

    def add(self, answer: CompletionOutput) -> None:
        """Count the new tokens of an answer."""
        self.num_output_tokens += len(answer.token_ids)

    def describe(self) -> dict[str, Any]:
        """Return the ``usage`` of a response."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "completion_tokens": self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
