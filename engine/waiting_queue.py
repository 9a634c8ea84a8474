"""Core process: requests that wait for admission."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice

from octavo.engine.policies import Policy
from octavo.engine.request import Request

MAX_PASSED = 128
"""Admissions that may pass the first request of the queue before it goes first in every plan."""


class WaitingQueue:
    """Sorted by the policy's constant key; read in the order in which the policy ranks.

    Age bound: when ``MAX_PASSED`` requests were admitted since the first of the queue became the
    first, plans begin with it. So nobody is passed for ever, whatever the cache holds.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request at its place; a retracted one returns to the place its key gives it."""
        self._policy.enter(request)
        insort(self._requests, request, key=self._policy.order_key)
        if self._requests[0] is request:
            self._num_passed = 0

    def admit(self, request: Request) -> None:
        """Take out a request that starts; those before it are passed."""
        self._num_passed += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in the queue."""
        index = self.position(request)
        assert self._requests[index] is request, f"{request!r} is not in the queue"
        del self._requests[index]
        self._policy.leave(request)
        if index == 0:
            self._num_passed = 0

    def ranked(self, count: int) -> Iterator[Request]:
        """Yield the ``count`` requests that a plan looks at; the queue must not change then."""
        if self._num_passed < MAX_PASSED:
            return islice(self._policy.rank(self._requests), count)
        aged = self._requests[0]
        others = (request for request in self._policy.rank(self._requests) if request is not aged)
        return islice(chain((aged,), others), count)

    def position(self, request: Request) -> int:
        """Return how many requests are before this one in the queue's own order."""
        key = self._policy.order_key(request)
        return bisect_left(self._requests, key, key=self._policy.order_key)
