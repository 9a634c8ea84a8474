import pytest

from octavo.engine.load_log import Load, LoadLog
from octavo.engine.messages import CoreOutputs, CoreStats, pack_ids
from octavo.engine.metrics import EngineMetrics
from tests.echo_core import ECHO_INFO

IDLE = Load(0, 0, 0.0, 0, 0, 0, 0)


class Engine:
    """A load and a clock that a test moves."""

    def __init__(self):
        self.load = IDLE
        self.now_s = 100.0

    def read_load(self):
        return self.load


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def look(engine, caplog):
    log = LoadLog(engine, clock=lambda: engine.now_s)

    def look(*, passed_s=10.0, **load):
        """Let time pass and the load change; return the line that is logged, if one is."""
        engine.now_s += passed_s
        engine.load = engine.load._replace(**load)
        caplog.clear()
        with caplog.at_level("INFO", "octavo.engine.load_log"):
            log.look()
        return caplog.messages[0] if caplog.messages else None

    return look


def test_line_tells_load_and_speed_since_the_last(look):
    busy = {"num_running": 3, "num_waiting": 5, "kv_usage": 0.125}
    counters = {"num_prompt_tokens": 1_000, "num_generated_tokens": 55}
    hits = {"num_prefix_queries": 80, "num_prefix_hits": 60}
    assert look(**busy, **counters, **hits) == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s,"
        " Avg generation throughput: 5.5 tokens/s,"
        " Running: 3 reqs, Waiting: 5 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 75.0%"
    )
    assert look(passed_s=20, num_generated_tokens=65, num_waiting=0) == (
        "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.5 tokens/s,"
        " Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%"
    )


def test_nothing_is_said_while_there_is_no_work(look):
    assert look() is None
    assert look() is None


def test_work_that_began_and_ended_between_two_looks_is_told(look):
    assert "generation throughput: 1.0 tokens/s" in look(num_generated_tokens=10)
    assert look() is None


def test_engine_that_stands_still_is_told_again_and_again(look):
    for _ in range(3):
        assert "Running: 1 reqs" in look(num_running=1)
    assert "Waiting: 2 reqs" in look(num_running=0, num_waiting=2)


def test_metrics_know_the_load():
    metrics = EngineMetrics("tiny", ECHO_INFO)
    assert metrics.read_load() == IDLE
    num_blocks_used = ECHO_INFO.num_blocks // 4
    stats = CoreStats(
        num_running=2,
        num_waiting=3,
        num_blocks_used=num_blocks_used,
        prefix_queries=64,
        prefix_hits=16,
    )
    outputs = CoreOutputs(numbers=[1], token_ids=pack_ids([5]), stats=stats)
    metrics.update(outputs)
    assert metrics.read_load() == Load(2, 3, 0.25, 0, 1, 64, 16)
