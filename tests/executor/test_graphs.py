"""Which batch sizes get a graph, and when a step is captured, replayed or launched singly."""

import gc
from itertools import pairwise

import pytest
import torch

from octavo.executor.graphs import (
    CAPTURE_ROWS,
    StepGraphs,
    default_sizes,
    mixed_shapes,
)
from octavo.executor.step_program import StepShape

EIGHT = StepShape.padded(8, 8)
DECODE = [StepShape.padded(size, size) for size in (8, 16, 24, 32)]
MIXED = [StepShape.padded(*shape) for shape in [(8, 64), (32, 64), (8, 128), (32, 128)]]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))


def make_graphs(*shapes):
    shapes = [StepShape.padded(*shape) for shape in shapes]
    return StepGraphs(shapes, create=lambda shape: None, edited=None)


class Tape:
    """A program and the graphs of it, on a device that only writes down what it is told."""

    def __init__(self, failing=()):
        self.events = []
        self.failing = failing
        """Parts that raise while they are captured."""
        self.capturing = None

    def forward(self):
        self._launch("forward")

    def sample(self, edited):
        self._launch("sample" if edited is None else "edit")

    def _launch(self, part):
        if self.capturing is None:
            self.events.append(part)
            return
        assert not gc.isenabled(), "the collector may free pinned memory"
        self.capturing.part = part
        if part in self.failing:
            raise torch.OutOfMemoryError(part)

    def take(self):
        return "scratch"

    def step(self, graphs, *, has_edits=False, shape=EIGHT):
        """Return what one step does that fits a shape."""
        self.events.clear()
        graphs.run(graphs.choose(shape), has_edits=has_edits)
        return list(self.events)

    def capture(self, graphs, *shapes):
        for shape in shapes:
            self.events.clear()
            graphs.run(shape, has_edits=False)


class TapeGraph:
    def __init__(self, tape):
        self.tape, self.part = tape, None

    def capture_begin(self, pool, capture_error_mode):
        assert self.tape.capturing is None
        self.tape.capturing = self

    def capture_end(self):
        self.tape.capturing = None
        self.tape.events.append(f"capture {self.part}")
        if self.part in self.tape.failing:
            raise RuntimeError("the capture was invalidated")

    def replay(self):
        self.tape.events.append(f"replay {self.part}")


@pytest.fixture
def record(monkeypatch):
    """Make the graphs of a tape."""

    def make(failing=(), shapes=(EIGHT,)):
        tape = Tape(failing)
        monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: TapeGraph(tape))
        return tape, StepGraphs(shapes, create=lambda shape: tape, edited=tape)

    return make


@pytest.mark.parametrize("max_rows", [1, 3, 8, 64, 100, 1024])
def test_default_sizes_reach_the_maximum_and_pad_little(max_rows):
    sizes = default_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    for smaller, larger in pairwise(sizes):
        assert larger - smaller <= max(8, smaller // 8)


def test_a_decode_step_is_padded_to_the_next_size():
    graphs = make_graphs((8, 8), (1, 1), (4, 4), (2, 16))
    found = [graphs.find_decode_shape(n) for n in (1, 2, 4, 5, 8)]
    assert [shape.num_rows for shape in found] == [1, 4, 4, 8, 8]
    assert all(shape.is_decode for shape in found)
    assert graphs.find_decode_shape(9) is None


def test_a_step_with_prompts_is_padded_to_the_fewest_tokens_then_rows():
    graphs = make_graphs((8, 8), (8, 16), (2, 16), (2, 8), (8, 32))
    found = {
        (1, 3): (2, 8),
        (2, 8): (2, 8),
        (3, 8): (8, 16),
        (2, 9): (2, 16),
        (8, 8): (8, 16),  # of which not all sample
        (2, 17): (8, 32),
    }
    for step, shape in found.items():
        assert graphs.find_mixed_shape(*step) == StepShape.padded(*shape)
    assert graphs.find_mixed_shape(9, 16) is None
    assert graphs.find_mixed_shape(1, 33) is None


@pytest.mark.parametrize("max_rows", [1, 20, 256, 1024])
@pytest.mark.parametrize("layer_bytes", [10**6, 42 * 10**6, 455 * 10**6, 10**10])
def test_mixed_shapes_have_more_tokens_than_rows_and_few_of_a_large_model(max_rows, layer_bytes):
    shapes = mixed_shapes(max_rows, max_tokens=8192, layer_bytes=layer_bytes)
    assert len(set(shapes)) == len(shapes)
    assert all(shape.num_rows < shape.num_tokens for shape in shapes)
    assert max((shape.num_rows for shape in shapes), default=0) <= max_rows
    most_tokens = max((shape.num_tokens for shape in shapes), default=0)
    assert most_tokens == {10**6: 2048, 42 * 10**6: 2048, 455 * 10**6: 512, 10**10: 0}[layer_bytes]


@pytest.mark.parametrize(("max_tokens", "largest"), [(1, 64), (64, 64), (65, 128), (9999, 2048)])
def test_no_shape_is_larger_than_steps_need(max_tokens, largest):
    shapes = mixed_shapes(8, max_tokens=max_tokens, layer_bytes=10**6)
    assert max(shape.num_tokens for shape in shapes) == largest


def test_without_shapes_no_step_has_a_graph():
    assert make_graphs().find_decode_shape(1) is None
    assert make_graphs().find_mixed_shape(1, 2) is None


CAPTURED = ["capture forward", "replay forward", "capture sample", "replay sample"]
REPLAYED = ["replay forward", "replay sample"]


@pytest.mark.parametrize("shape", [EIGHT, MIXED[0]], ids=["decode", "mixed"])
def test_a_step_is_captured_when_it_first_runs(record, shape):
    tape, graphs = record(shapes=[EIGHT, *MIXED])
    assert graphs.captured_shapes == []
    assert tape.step(graphs, shape=shape) == CAPTURED
    assert tape.step(graphs, shape=shape) == REPLAYED
    assert graphs.captured_shapes == [shape]


def test_edits_are_captured_when_they_are_first_made(record):
    tape, graphs = record()
    tape.step(graphs)
    assert tape.step(graphs, has_edits=True) == ["replay forward", "capture edit", "replay edit"]
    assert tape.step(graphs, has_edits=True) == ["replay forward", "replay edit"]


def test_a_forward_pass_that_cannot_be_captured_runs_singly_for_ever(record, caplog):
    tape, graphs = record(failing=["forward"])
    assert tape.step(graphs) == ["capture forward", "forward", "sample"]
    assert tape.step(graphs) == ["forward", "sample"]
    assert tape.step(graphs, has_edits=True) == ["forward", "edit"]
    assert graphs.captured_shapes == []
    (message,) = caplog.messages
    assert message.startswith("cannot capture forward of 8 rows and 8 tokens")


def test_sampling_that_cannot_be_captured_runs_behind_the_graph(record, caplog):
    tape, graphs = record(failing=["sample"])
    assert tape.step(graphs) == ["capture forward", "replay forward", "capture sample", "sample"]
    assert tape.step(graphs) == ["replay forward", "sample"]
    (message,) = caplog.messages
    assert message.startswith("cannot capture sample of 8 rows and 8 tokens")


@pytest.mark.parametrize("failing", [[], ["forward"]])
def test_garbage_is_collected_again_behind_a_capture(record, failing):
    tape, graphs = record(failing=failing)
    tape.step(graphs)
    assert gc.isenabled()


def test_an_error_of_the_step_itself_is_raised(record):
    tape, graphs = record()

    def fail():
        raise RuntimeError("forward")

    tape.forward = fail
    for _ in range(2):
        with pytest.raises(RuntimeError, match="forward"):
            graphs.run(EIGHT, has_edits=False)


@pytest.mark.parametrize("shapes", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_shape_without_a_graph_takes_the_captured_one_that_pads_least(record, shapes):
    tape, graphs = record(shapes=[*DECODE, *MIXED])
    smallest, second, third, largest = shapes
    tape.capture(graphs, *(DECODE if shapes is MIXED else MIXED))
    assert graphs._find_captured(smallest) is None, "those of another kind are no help"
    tape.capture(graphs, largest)
    assert graphs.choose(smallest) is largest
    tape.capture(graphs, second)
    assert graphs.choose(smallest) is second
    assert graphs.choose(second) is second
    assert graphs.choose(third) is largest
    assert graphs.choose(largest) is largest


@pytest.mark.parametrize("shapes", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_shape_is_captured_when_padding_has_cost_as_much(record, shapes):
    tape, graphs = record(shapes=shapes)
    eight, sixteen, third, largest = shapes
    tape.capture(graphs, largest)
    num_padded = CAPTURE_ROWS // eight.count_padding(largest)
    assert [graphs.choose(eight) for _ in range(num_padded)] == [largest] * num_padded
    assert tape.step(graphs, shape=sixteen) == CAPTURED, "whichever is wanted when it is too much"
    assert graphs.captured_shapes == [sixteen, largest]
    assert graphs.choose(eight) is sixteen
    assert graphs.choose(third) is largest, "the account is settled"


@pytest.mark.parametrize("failing", [["forward"], []], ids=["capture fails", "given up"])
def test_a_shape_that_cannot_be_captured_is_padded_for_ever(record, failing):
    tape, graphs = record(shapes=DECODE)
    eight, _, _, largest = DECODE
    tape.capture(graphs, largest)
    tape.failing = failing
    if failing:
        tape.capture(graphs, eight)
    else:
        graphs.give_up(eight)
    assert {graphs.choose(eight) for _ in range(CAPTURE_ROWS)} == {largest}


def test_no_step_is_padded_to_a_shape_that_was_given_up_after_its_capture(record):
    tape, graphs = record(shapes=DECODE)
    eight, sixteen, _, largest = DECODE
    tape.capture(graphs, largest, sixteen)
    assert graphs.choose(eight) is sixteen
    graphs.give_up(sixteen)
    assert graphs.choose(eight) is largest
