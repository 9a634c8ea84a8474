"""Core process: the waiting requests as a tree over their block keys."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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


class KeyTree:
    """Keeps requests so that those which share a prefix can be read one after the other."""

    def __init__(self) -> None:
        self._root = KeyNode()
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
        del node.requests[request.number]
        for key in keys:
            child = node.children.get(key)
            if child is None:
                return  # the node was unexpanded
            del child.requests[request.number]
            if not child.requests:
                del node.children[key]
                return
            node = child
        node.ending.pop(request.number, None)

    def depth_first(self, is_cached: Callable[[bytes], bool]) -> Iterator[Request]:
        """Yield all requests depth first; the tree must not change meanwhile.

        Among siblings, subtrees whose K/V exists come first, then the larger ones, then the older.
        """
        stack = [self._root]
        while stack:
            node = stack.pop()
            if len(node.requests) == 1:
                yield from node.requests.values()
                continue
            yield from node.ending.values()
            if len(node.children) == 1:
                stack += node.children.values()
                continue
            ranked = sorted(node.children.items(), key=lambda item: _rank(is_cached, *item))
            stack += [child for _, child in ranked]

    def _hang(self, node: KeyNode, request: Request, depth: int) -> None:
        """Put a request below a node whose child it does not have yet, as deep as needed: once."""
        keys = self._keys[request.number]
        if depth == len(keys):
            node.ending[request.number] = request
        else:
            node.children[keys[depth]] = KeyNode({request.number: request})


def _rank(is_cached: Callable[[bytes], bool], key: bytes, node: KeyNode) -> tuple[bool, int, int]:
    return is_cached(key), len(node.requests), -next(iter(node.requests))
