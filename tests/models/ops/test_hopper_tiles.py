"""What a program of the products on Hopper takes."""

import pytest

from octavo.models.ops.hopper_tiles import MAX_REGISTERS, NUM_MULTIPROCESSORS, Tile, choose_tile
from octavo.models.ops.linear_hopper import PADDED_ROWS

SHAPES = [
    (features, inputs)
    for features in (8, 640, 1024, 4096, 6144, 24_576, 28_672, 51_200, 151_936)
    for inputs in (8, 576, 1024, 4096, 12_288, 25_600)
]


@pytest.mark.parametrize(("num_features", "num_inputs"), SHAPES)
def test_programs_of_parts_run_at_once(num_features, num_inputs):
    tile = choose_tile(num_features, num_inputs)
    assert tile.num_parts == 1 or tile.count_programs(num_features) <= NUM_MULTIPROCESSORS


@pytest.mark.parametrize("rows", PADDED_ROWS)
@pytest.mark.parametrize(("num_features", "num_inputs"), SHAPES)
def test_tiles_fit_a_multiprocessor(num_features, num_inputs, rows):
    tile = choose_tile(num_features, num_inputs)
    assert tile.count_stages(rows) >= rows // 32, "sums are put where stages were"
    registers, _ = tile.share_registers()
    assert 128 * (tile.num_consumers + 1) * registers * tile.num_neighbours <= MAX_REGISTERS


@pytest.mark.parametrize(
    ("num_features", "num_inputs", "expected"),
    [
        (6144, 4096, Tile(1, 1)),
        (4096, 4096, Tile(1, 2)),
        (24_576, 4096, Tile(3, 1)),
        (4096, 12_288, Tile(1, 2)),
        (4096, 1024, Tile(1, 1)),
        (1024, 2048, Tile(1, 4)),
        (6144, 1024, Tile(1, 1)),
        (1024, 3072, Tile(1, 4)),
        (151_936, 1024, Tile(1, 1, 2)),
    ],
)
def test_measured_matrices_get_the_tiles_that_were_best(num_features, num_inputs, expected):
    assert choose_tile(num_features, num_inputs) == expected
