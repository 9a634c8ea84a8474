"""A server over a core that echoes prompts, for all tests that only read from it."""

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from tests.gated_executor import GatedExecutor
from tests.live_server import running_server


@pytest.fixture(scope="package")
def server():
    with running_server() as live:
        yield live


@pytest.fixture
def gated():
    """An engine core that runs one request at a time, on a device that can stand still."""
    config = SchedulerConfig(
        num_blocks=512,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=8192,
    )
    executor = GatedExecutor(config.num_blocks, config.block_size, num_rows=1, vocab_size=345)
    return EngineCore(executor, config, lag=0), executor
