"""Core process: scheduling policies, the order of admission and of retraction, as objects."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from octavo.block_manager.manager import BlockManager
from octavo.config import SchedulerConfig, SchedulingPolicyName
from octavo.engine.key_tree import KeyTree
from octavo.engine.request import Request

OrderKey = tuple[int, ...]


class Policy(Protocol):
    """Orders requests twice: by a constant key, and by what the cache holds now."""

    is_by_arrival: bool
    """Whether a request that arrives later is never in front of one that waits already."""

    def order_key(self, request: Request) -> OrderKey:
        """Return the key of the queue's order; the last in it is retracted first. Never changes."""

    def enter(self, request: Request) -> None:
        """Get to know a request that begins to wait."""

    def leave(self, request: Request) -> None:
        """Forget a request that no longer waits."""

    def rank(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Return the order in which a plan looks at the queue, given in its own order.

        The queue does not change while the order is read.
        """


class FirstComeFirstServed:
    """By arrival."""

    is_by_arrival = True

    def order_key(self, request: Request) -> OrderKey:
        """Order by request number, which grows with arrival."""
        return (request.number,)

    def enter(self, request: Request) -> None:
        """Nothing to remember."""

    def leave(self, request: Request) -> None:
        """Nothing to forget."""

    def rank(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Keep the queue's order."""
        return waiting


class ByPriority(FirstComeFirstServed):
    """By priority, lower first; by arrival among equals."""

    is_by_arrival = False

    def order_key(self, request: Request) -> OrderKey:
        """Order by priority, then by request number."""
        return (request.message.priority, request.number)


class LongestPrefixMatch(FirstComeFirstServed):
    """Those with the longest cached prefix first, among the ``window`` first by arrival.

    Prefixes are looked up again only when a key at the edge of one has appeared or vanished.
    """

    is_by_arrival = False

    def __init__(self, block_manager: BlockManager, window: int | None) -> None:
        self._block_manager = block_manager
        self._watch = block_manager.pool.watch
        self._window = window
        self._num_matched: dict[int, int] = {}

    def leave(self, request: Request) -> None:
        """Forget what was looked up."""
        self._num_matched.pop(request.number, None)

    def rank(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Sort a window by what the cache holds; by arrival among equals."""
        if self._watch.has_changed:
            self._watch.reset()
            self._num_matched.clear()
        window = list(islice(waiting, self._window))
        for request in window:
            if request.number not in self._num_matched:
                self._look_up(request)
        return sorted(window, key=lambda request: -self._num_matched[request.number])

    def _look_up(self, request: Request) -> None:
        match = self._block_manager.match(request.number, request.num_known_tokens)
        num_matched = len(match.blocks)
        self._num_matched[request.number] = num_matched
        edge = self._block_manager.chain(request.number).keys[num_matched : num_matched + 2]
        self._watch.keys.update(edge)  # the last key that exists and the first that does not


class DepthFirst(FirstComeFirstServed):
    """Depth first over the tree of block keys, so that a prefix is used up before it is evicted.

    Optimal for a batch while the cache holds the longest request (Zheng et al., SGLang, 2024,
    theorem 3.1).
    """

    is_by_arrival = False

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._tree = KeyTree(block_manager.pool.has_key, block_manager.pool.watch)

    def enter(self, request: Request) -> None:
        """Put a request into the tree under the keys that it has now."""
        self._tree.add(request, self._block_manager.chain(request.number).keys[1:])

    def leave(self, request: Request) -> None:
        """Take a request out of the tree."""
        self._tree.remove(request)

    def rank(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Walk the tree; the queue's own order plays no part."""
        return self._tree.depth_first()


PolicyFactory = Callable[[SchedulerConfig, BlockManager], Policy]

POLICIES: dict[SchedulingPolicyName, PolicyFactory] = {
    "fcfs": lambda config, block_manager: FirstComeFirstServed(),
    "priority": lambda config, block_manager: ByPriority(),
    "lpm": lambda config, block_manager: LongestPrefixMatch(block_manager, config.ranking_window),
    "dfs": lambda config, block_manager: DepthFirst(block_manager),
}
