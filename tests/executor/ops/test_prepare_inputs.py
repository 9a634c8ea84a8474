"""Inputs gathered on the device are those that the CPU gathers, padded to the graph's size."""

import numpy as np
import pytest
import torch

from octavo.executor.device_rows import DeviceRows
from octavo.executor.input_batch import gather_inputs
from octavo.executor.ops import prepare_inputs as module
from octavo.executor.ops.prepare_inputs import DeviceBatch, prepare_inputs
from octavo.executor.ops.write_rows import write_rows
from octavo.executor.rows import Rows
from tests.steps import make_row, make_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 4
MAX_LEN = 64
DECODE = [(3, 1, 20, True), (0, 1, 5, True), (2, 1, 7, True)]
MIXED = [(3, 1, 20, True), (0, 9, 0, False), (1, 1, 8, True), (4, 30, 2, True), (2, 3, 5, False)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE", 8)


def make_rows(num_rows=6):
    """Full rows of distinct ids and shuffled blocks, on the host and on the device."""
    generator = np.random.default_rng(0)
    host = Rows(num_rows, max_tokens=MAX_LEN, max_blocks=MAX_LEN // BLOCK_SIZE)
    for row in range(num_rows):
        blocks = tuple(int(block) for block in generator.permutation(500)[: MAX_LEN // BLOCK_SIZE])
        ids = generator.integers(0, 1000, MAX_LEN)
        host.write(make_row(row, number=row, token_ids=ids, blocks=blocks))
    device = DeviceRows.create(
        num_rows, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, device=DEVICE
    )
    device.token_ids.copy_(torch.from_numpy(host.token_ids))
    device.block_tables.copy_(torch.from_numpy(host.block_tables))
    return host, device


def make_columns(step, num_rows):
    columns = np.zeros((4, num_rows), dtype=np.int32)
    columns[0] = -1
    values = (step.rows, step.num_tokens, step.num_computed_tokens, step.sample)
    for column, value in zip(columns, values, strict=True):
        column[: len(value)] = value
    return torch.from_numpy(columns).to(DEVICE)


def make_batch(num_rows, num_tokens):
    batch = DeviceBatch.create(
        num_rows, num_tokens, max_num_blocks=MAX_LEN // BLOCK_SIZE, device=DEVICE
    )
    inputs = batch.attention
    for tensor in (
        *(batch.input_ids, batch.sampled_rows, batch.sampled_tokens, batch.sampled_positions),
        *(inputs.query_start, inputs.context_lengths, inputs.positions, inputs.slot_mapping),
    ):
        tensor.fill_(-77)
    return batch


def run(scheduled, *, num_rows, num_tokens, max_row_tokens=1):
    host, device = make_rows()
    step = make_step(0, scheduled)
    batch = make_batch(num_rows, num_tokens)
    prepare_inputs(
        make_columns(step, num_rows),
        token_ids=device.token_ids,
        block_tables=device.block_tables,
        block_size=BLOCK_SIZE,
        out=batch,
        max_row_tokens=max_row_tokens,
    )
    return batch, gather_inputs(host, step, block_size=BLOCK_SIZE)


def assert_starts_with(found, expected, *, rest):
    """``found`` is ``expected`` and then ``rest`` to its end."""
    expected = torch.as_tensor(expected)
    assert found[: len(expected)].tolist() == expected.tolist()
    assert (found[len(expected) :] == rest).all()


@pytest.mark.parametrize(
    ("scheduled", "num_rows", "num_tokens", "longest"),
    [(DECODE, 3, 3, 1), (DECODE, 8, 8, 1), (MIXED, 5, 44, 1), (MIXED, 7, 60, 30)],
)
def test_inputs_equal_the_cpus_and_end_in_padding(scheduled, num_rows, num_tokens, longest):
    batch, expected = run(
        scheduled, num_rows=num_rows, num_tokens=num_tokens, max_row_tokens=longest
    )
    inputs, wanted = batch.attention, expected.attention
    assert_starts_with(batch.input_ids, expected.input_ids, rest=0)
    assert_starts_with(inputs.positions, wanted.positions, rest=0)
    assert_starts_with(inputs.slot_mapping, wanted.slot_mapping, rest=-1)
    assert_starts_with(inputs.query_start, wanted.query_start, rest=wanted.query_start[-1])
    assert_starts_with(inputs.context_lengths, wanted.context_lengths, rest=0)
    assert_starts_with(batch.sampled_rows, expected.sampled_rows, rest=-1)
    assert_starts_with(batch.sampled_tokens, expected.sampled_tokens, rest=0)


def test_a_sampled_token_comes_after_its_rows_context():
    batch, _ = run(MIXED, num_rows=6, num_tokens=48)
    assert_starts_with(batch.sampled_positions, [21, 9, 32], rest=0)


def test_block_tables_are_copied_as_far_as_the_context_reaches():
    batch, expected = run(MIXED, num_rows=6, num_tokens=48, max_row_tokens=30)
    tables = expected.attention.block_tables
    for index, length in enumerate(expected.attention.context_lengths.tolist()):
        num_blocks = -(-length // BLOCK_SIZE)
        row = batch.attention.block_tables[index]
        assert_starts_with(row, tables[index, :num_blocks], rest=0)


def test_written_ranges_land_in_their_rows_and_nothing_else_changes():
    target = torch.full((4, 3000), -7, dtype=torch.int32, device=DEVICE)
    values = torch.arange(2600, dtype=torch.int32, device=DEVICE)
    ranges = [(3, 0, 5, 1), (0, 10, 6, 2500), (1, 2999, 2599, 1), (2, 4, 0, 0)]
    expected = target.clone()
    for row, column, start, length in ranges:
        expected[row, column : column + length] = values[start : start + length]
    write_rows(target, torch.tensor(ranges, dtype=torch.int32, device=DEVICE), values)
    assert torch.equal(target, expected)
