"""How many blocks the running requests are expected to take."""

from types import SimpleNamespace

import pytest

from octavo.block_manager.block_table import BlockSpec, blocks_needed
from octavo.engine.growth import MAX_TOKENS_COUNTED, GrowthEstimate

REMAINING = (0, 1, 3, 4, 5, 100, MAX_TOKENS_COUNTED - 1, MAX_TOKENS_COUNTED, 100_000)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("conservativeness", [0.0, 0.3, 1.0])
def test_growth_is_counted_as_the_blocks_of_tokens_are(block_size, conservativeness):
    spec = BlockSpec(block_size)
    growth = GrowthEstimate(spec, conservativeness)
    requests = [SimpleNamespace(num_tokens=7, max_total_tokens=7 + num) for num in REMAINING]
    expected = [int(growth.ratio * min(num, MAX_TOKENS_COUNTED)) for num in REMAINING]
    assert growth.num_blocks(requests) == sum(blocks_needed(spec, num) for num in expected)
