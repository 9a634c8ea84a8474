"""Core process: the waiting requests as a tree over their block keys."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.block_manager.block_pool import KeyWatch
from octavo.engine.request import Request


@dataclass(slots=True, eq=False)
class KeyNode:
    """All waiting requests whose key chains agree up to here.

    A node with one request may be unexpanded: no child, nothing ends in it. Paths are made only as
    deep as two requests share them.
    """

    requests: dict[int, Request] = field(default_factory=dict)
    """The whole subtree's, in order of entry."""
    children: dict[bytes, "KeyNode"] = field(default_factory=dict)
    ending: dict[int, Request] = field(default_factory=dict)
    """Those whose chain ends here."""
    ranked: list["KeyNode"] | None = None
    """The children, the first last, as they were ranked; None when one came or went since."""
    ranking: int = 0
    """Which of the tree's rankings that was: older ones are out of date."""


class KeyTree:
    """Keeps requests so that those which share a prefix can be read one after the other.

    Children are ranked when they are read, and again only after one came or went, or a key that
    ``watch`` watches appeared in the pool or vanished: many wait, and a plan looks at few.
    """

    def __init__(self, is_cached: Callable[[bytes], bool], watch: KeyWatch) -> None:
        self._is_cached = is_cached
        self._watch = watch
        self._root = KeyNode()
        self._ranking = 0
        self._keys: dict[int, list[bytes]] = {}

    def add(self, request: Request, keys: list[bytes]) -> None:
        """Insert a request under its chain."""
        self._keys[request.number] = keys
        node = self._root
        depth = 0
        while True:
            if node.requests and not node.children and not node.ending:
                (other,) = node.requests.values()
                self._hang(node, other, depth)
            node.requests[request.number] = request
            node.ranked = None
            child = node.children.get(keys[depth]) if depth < len(keys) else None
            if child is None:
                self._hang(node, request, depth)
                return
            node = child
            depth += 1

    def remove(self, request: Request) -> None:
        """Take a request out, with the nodes that only it needed."""
        keys = self._keys.pop(request.number)
        node = self._root
        node.ranked = None
        del node.requests[request.number]
        for key in keys:
            child = node.children.get(key)
            if child is None:
                return  # the node was unexpanded
            child.ranked = None
            del child.requests[request.number]
            if not child.requests:
                del node.children[key]
                return
            node = child
        node.ending.pop(request.number, None)

    def depth_first(self) -> Iterator[Request]:
        """Yield all requests depth first; the tree must not change meanwhile.

        Among siblings, subtrees whose K/V exists come first, then the larger ones, then the older.
        """
        if self._watch.has_changed:
            self._watch.reset()
            self._ranking += 1
        stack = [self._root]
        while stack:
            node = stack.pop()
            if len(node.requests) == 1:
                yield from node.requests.values()
                continue
            yield from node.ending.values()
            stack += self._rank(node)

    def _rank(self, node: KeyNode) -> list[KeyNode]:
        """Return a node's children, the first last."""
        if node.ranked is not None and node.ranking == self._ranking:
            return node.ranked

        def rank(item: tuple[bytes, KeyNode]) -> tuple[bool, int, int]:
            key, child = item
            return self._is_cached(key), len(child.requests), -next(iter(child.requests))

        node.ranked = [child for _, child in sorted(node.children.items(), key=rank)]
        node.ranking = self._ranking
        self._watch.keys.update(node.children)
        return node.ranked

    def _hang(self, node: KeyNode, request: Request, depth: int) -> None:
        """Put a request below a node whose child it does not have yet, as deep as needed: once."""
        keys = self._keys[request.number]
        if depth == len(keys):
            node.ending[request.number] = request
        else:
            node.children[keys[depth]] = KeyNode({request.number: request})
