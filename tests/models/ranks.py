"""Several ranks of one network in one process, each on a thread of its own."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from octavo.models.layers.parallel import Shard


class ThreadRanks:
    """Collectives between threads: every rank puts its tensor down, then reads all of them."""

    def __init__(self, size):
        self.size = size
        self.tensors = [None] * size
        self.barrier = Barrier(size, timeout=30)

    def run(self, work):
        """Call ``work(shard)`` on every rank at once and return the results in rank order."""
        shards = [Shard(rank, self.size, _Collective(self, rank)) for rank in range(self.size)]
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(work, shards))


class _Collective:
    def __init__(self, ranks, rank):
        self.ranks = ranks
        self.rank = rank

    def all_reduce(self, tensor):
        return sum(self._exchange(tensor))

    def all_gather(self, tensor):
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor):
        self.ranks.tensors[self.rank] = tensor
        self.ranks.barrier.wait()
        tensors = list(self.ranks.tensors)
        self.ranks.barrier.wait()
        return tensors
