"""A journal repeats a run exactly, notices any change, and costs little."""

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.core import EngineCore
from octavo.engine.journal import Journal
from octavo.engine.messages import AbortRequests, ExpireRequests, FinishRequest
from octavo.engine.replay import ReplayDivergedError, read_journal, replay
from tests.engine.requests import EOS, make_add, make_config, make_core
from tests.fake_executor import FakeExecutor, Faults, every_nth


def run_eventfully(lag=0, seed=0, **fields):
    """Return the records of a run with sharing, chunks, retraction, an abort and a failed step."""
    options = {"special_token": every_nth(40, EOS), "faults": Faults(submit={9}, non_finite={3: 9})}
    run = make_core(
        lag=lag,
        num_blocks=7,
        max_num_batched_tokens=12,
        max_num_seqs=3,
        executor_options=options,
        **fields,
    )
    for number in range(12):
        prompt = [*range(seed, seed + 4 * (number % 3)), 50 + number]
        run.core.apply([make_add(number, prompt, max_tokens=14, priority=-number)])
        run.step()
        if number == 6:
            run.core.apply([AbortRequests((5, 6))])
        if number == 8 and 7 in run.scheduler.requests:
            run.core.apply([FinishRequest(7, "x", 0)])
        if number == 10:
            run.core.apply([ExpireRequests((9, 10), "time is up")])
    run.run()
    journal = run.scheduler.journal
    return [journal.config_record, *journal.records]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "dfs"])
@pytest.mark.parametrize("lag", [0, 1])
@given(seed=st.integers(0, 5))
@settings(max_examples=5, deadline=None)
def test_a_replay_takes_identical_decisions(lag, policy, seed):
    records = run_eventfully(lag, seed, policy=policy)
    assert any(record[0] == "plan" and len(record) > 2 and record[2] for record in records)
    assert {"add", "abort", "expire", "fail"} <= {record[0] for record in records}
    assert replay(records) == len(records)


def test_one_altered_record_stops_the_replay_there():
    records = run_eventfully()
    index = next(i for i, r in enumerate(records) if r[0] == "plan" and len(r) > 2 and r[3])
    kind, step_id, retracted, admitted, chunks = records[index]
    number, cached, scheduled = admitted[0]
    altered = (kind, step_id, retracted, [(number, cached, scheduled + 1)], chunks)
    with pytest.raises(ReplayDivergedError, match=f"record {index} says"):
        replay([*records[:index], altered, *records[index + 1 :]])


def test_a_file_keeps_every_record(tmp_path):
    path = tmp_path / "journal.jsonl"
    config = make_config()
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=config.max_num_seqs)
    core = EngineCore(executor, config, lag=0, journal=Journal(config, sink=path.open("wb")))
    core.apply([make_add(0, 9, max_tokens=4)])
    while core.has_work:
        core.step()
    core.shutdown()
    assert replay(read_journal(path)) == len(core.scheduler.journal.records) + 1


@pytest.mark.parametrize(
    ("num_requests", "words"),
    [(1, "the journal lacks its last records"), (500, "the journal ends here")],
)
def test_a_full_disk_ends_the_journal_and_nothing_else(num_requests, words, caplog):
    config = make_config()
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=config.max_num_seqs)
    with Path("/dev/full").open("wb") as full:
        core = EngineCore(executor, config, lag=0, journal=Journal(config, sink=full))
        core.apply([make_add(number, 9, max_tokens=4) for number in range(num_requests)])
        while core.has_work:
            core.step()
        core.shutdown()
    (message,) = (record.getMessage() for record in caplog.records)
    assert words in message
    assert "No space left on device" in message


def test_a_step_in_which_all_rows_decode_takes_few_bytes():
    sink = io.BytesIO()
    config = make_config(num_blocks=64, block_size=16)
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=config.max_num_seqs)
    core = EngineCore(executor, config, lag=0, journal=Journal(config, sink=sink))
    core.apply([make_add(number, 5, max_tokens=60) for number in range(8)])
    core.step()
    num_bytes = len(sink.getvalue())
    for _ in range(50):
        core.step()
    assert (len(sink.getvalue()) - num_bytes) / 50 <= 200


def test_prompts_appear_as_keys_and_lengths_only():
    config = make_config()
    executor = FakeExecutor(config.num_blocks, config.block_size, num_rows=config.max_num_seqs)
    core = EngineCore(executor, config, lag=0)
    core.apply([make_add(0, [987_654] * 9)])
    record = core.scheduler.journal.records[-1]
    assert record[:3] == ("add", 0, 9)
    assert b"987654" not in msgspec.json.encode(record)
