"""Core process: requests that wait for admission, in the policy's order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from octavo.engine.policies import Policy
from octavo.engine.request import Request


class WaitingQueue:
    """Sorted by the policy; a retracted request returns to the place that its key gives it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert at the request's place."""
        insort(self._requests, request, key=self._policy.order_key)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in the queue."""
        key = self._policy.order_key(request)
        index = bisect_left(self._requests, key, key=self._policy.order_key)
        assert self._requests[index] is request, f"{request!r} is not in the queue"
        del self._requests[index]

    def first(self, count: int) -> list[Request]:
        """Return the first ``count`` requests in order."""
        return list(islice(self._requests, count))

    def position(self, request: Request) -> int:
        """Return how many requests are before this one."""
        key = self._policy.order_key(request)
        return bisect_left(self._requests, key, key=self._policy.order_key)
