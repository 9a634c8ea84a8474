"""Core process: scheduling policies, the order of admission and of retraction, as objects."""

from typing import Protocol

from octavo.config import SchedulingPolicyName
from octavo.engine.request import Request

OrderKey = tuple[int, ...]


class Policy(Protocol):
    """A total order of requests: the first is admitted first, the last is retracted first."""

    def order_key(self, request: Request) -> OrderKey:
        """Return the sort key; it must not change while the request lives."""


class FirstComeFirstServed:
    """By arrival."""

    def order_key(self, request: Request) -> OrderKey:
        """Order by request number, which grows with arrival."""
        return (request.number,)


class ByPriority:
    """By priority, lower first; by arrival among equals."""

    def order_key(self, request: Request) -> OrderKey:
        """Order by priority, then by request number."""
        return (request.message.priority, request.number)


POLICIES: dict[SchedulingPolicyName, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
}
