"""How the work of ``linear_hopper`` is cut, and what each cut would take on an H200."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

TUNED_FOR = ("H200",)
"""Devices whose tiles are known to be faster than cuBLAS."""
NUM_FEATURES = 64
"""Of a tile: what one warpgroup multiplies at once."""
NUM_COLUMNS = 64
"""Inputs of a stage: 128 bytes, as many as copies spread over the banks of shared memory."""
SHARED_BYTES = 226_000
"""Of a multiprocessor, for stages; what else the programs need is ``OTHER_SHARED_BYTES``."""
OTHER_SHARED_BYTES = 4096
"""Of a consumer, to bring values from the layout of one operation into that of another."""
MAX_REGISTERS = 65536
"""Of a multiprocessor."""
PRODUCER_REGISTERS = 40
"""Of a thread; with 24 it spills."""

NUM_MULTIPROCESSORS = 132
BYTES_A_US = 4.2e6
"""What the device reads."""
BYTES_A_US_OF_ONE = 45e3
"""What one multiprocessor reads at most: it takes about 90 of them to keep the memory busy."""
WAVE_US = 2.0
"""For the programs that start when others have ended, unless there is room beside these."""
MEETING_US = 1.0
"""For sums that go through memory, and for each of their parts: guesses, whose choices were the
best of all tiles at 64 rows of both models (docs/benchmarks.md, "33 to 128 rows")."""
PART_US = 0.25


class Tile(NamedTuple):
    """What a program takes: consumers, and one of so many parts of the inputs."""

    num_consumers: int
    num_parts: int
    num_neighbours: int = 1
    """Programs that a multiprocessor has room for: the next starts before the first has ended."""

    def count_programs(self, num_features: int) -> int:
        """Return how many programs there are."""
        features = NUM_FEATURES * self.num_consumers
        return -(-num_features // features) * self.num_parts

    def count_stages(self, rows: int) -> int:
        """Return how many stages its share of the shared memory holds."""
        stage_bytes = 2 * NUM_COLUMNS * (NUM_FEATURES * self.num_consumers + rows)
        room = SHARED_BYTES // self.num_neighbours - OTHER_SHARED_BYTES * self.num_consumers
        return room // stage_bytes

    def share_registers(self) -> tuple[int, int]:
        """Return registers of a thread before they are shared out, and of a consumer behind it."""
        num_groups = self.num_consumers + 1
        registers = MAX_REGISTERS // (128 * num_groups * self.num_neighbours)
        registers = min(248, registers // 8 * 8)
        left = registers * num_groups - PRODUCER_REGISTERS
        return registers, min(240, left // self.num_consumers // 8 * 8)


@cache
def is_tuned_for(device: torch.device) -> bool:
    """Return whether the tiles were chosen on such a device; on others cuBLAS multiplies."""
    return any(name in torch.cuda.get_device_name(device) for name in TUNED_FOR)


@cache
def choose_tile(num_features: int, num_inputs: int) -> Tile:
    """Choose the tile that takes least time by a rough account of it."""
    tiles = _list_tiles(num_features)
    return min(tiles, key=lambda tile: _estimate_us(tile, num_features, num_inputs))


def _list_tiles(num_features: int) -> Iterator[Tile]:
    """Yield what may be chosen: parts only where all programs run at once."""
    for num_consumers in (1, 2, 3):
        for num_parts in (1, 2, 4, 8):
            tile = Tile(num_consumers, num_parts)
            if num_parts == 1 or tile.count_programs(num_features) <= NUM_MULTIPROCESSORS:
                yield tile
    if num_features > NUM_MULTIPROCESSORS * NUM_FEATURES * 3:
        yield Tile(1, 1, 2)


def _estimate_us(tile: Tile, num_features: int, num_inputs: int) -> float:
    """Estimate the time of a product: that of the device, or of its busiest multiprocessor."""
    num_programs = tile.count_programs(num_features)
    num_waves = -(-num_programs // (NUM_MULTIPROCESSORS * tile.num_neighbours))
    part = -(-num_inputs // tile.num_parts)
    bytes_of_one = 2 * NUM_FEATURES * tile.num_consumers * part * num_waves * tile.num_neighbours
    reading = max(2 * num_features * num_inputs / BYTES_A_US, bytes_of_one / BYTES_A_US_OF_ONE)
    meeting = MEETING_US + PART_US * tile.num_parts if tile.num_parts > 1 else 0.0
    waiting = WAVE_US * (num_waves - 1) if tile.num_neighbours == 1 else 0.0
    return reading + meeting + waiting
