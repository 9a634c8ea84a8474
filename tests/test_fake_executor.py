"""The fake executor catches what it promises to catch."""

import pytest

from octavo.executor.step import BlockCopy, NewBlocks, RowSampling
from tests.fake_executor import FakeExecutor, Faults, every_nth
from tests.steps import PROMPT, make_row, make_step


def run(executor, step):
    return executor.submit(step).result()


def decode(executor, row, num_known, num_steps, step_id=1):
    """Run decode steps of one row and return its tokens."""
    tokens = []
    for i in range(num_steps):
        result = run(executor, make_step(step_id + i, [(row, 1, num_known + i, True)]))
        tokens.append(int(result.token_ids[0]))
    return tokens


def test_tokens_are_those_of_a_lone_request_whatever_the_chunks():
    executor = FakeExecutor()
    run(executor, make_step(0, [(0, 4, 0, False)], new=[make_row()]))
    first = run(executor, make_step(1, [(0, 2, 4, True)])).token_ids.tolist()
    assert first + decode(executor, 0, 6, 2, step_id=2) == executor.expected_tokens(PROMPT, 3)


def test_seed_matters_only_with_a_temperature():
    executor = FakeExecutor()
    greedy = [executor.expected_tokens(PROMPT, 5, RowSampling(seed=s)) for s in (1, 2)]
    drawn = [
        executor.expected_tokens(PROMPT, 5, RowSampling(seed=s, temperature=1.0)) for s in (1, 2)
    ]
    assert greedy[0] == greedy[1]
    assert drawn[0] != drawn[1]


def test_special_tokens_come_and_are_held_back():
    executor = FakeExecutor(special_token=every_nth(1, token_id=2))
    held_back = RowSampling(seed=0, min_tokens=2, held_back_ids=(2,))
    tokens = executor.expected_tokens(PROMPT, 3, held_back)
    assert tokens[2] == 2
    assert 2 not in tokens[:2]


def test_a_prefix_written_in_the_same_step_may_be_shared():
    executor = FakeExecutor()
    other = make_row(1, number=1, token_ids=[11, 12, 13, 14, 99], computed=4, blocks=(0, 2))
    run(executor, make_step(0, [(1, 1, 4, True), (0, 6, 0, True)], new=[make_row(), other]))


def test_sharing_a_block_of_another_prefix_fails():
    executor = FakeExecutor()
    other = make_row(1, number=1, token_ids=[11, 12, 13, 77, 99], computed=4, blocks=(0, 2))
    step = make_step(0, [(1, 1, 4, True), (0, 6, 0, True)], new=[make_row(), other])
    with pytest.raises(
        AssertionError, match=r"row 1: the K/V of position 3 of 5 is not in block 0"
    ):
        executor.submit(step)


def test_a_block_taken_from_a_living_row_fails_at_once():
    executor = FakeExecutor()
    run(executor, make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    thief = make_row(1, number=1, token_ids=[5, 6, 7], blocks=(1,))
    with pytest.raises(AssertionError, match=r"row 0: the K/V of position 4"):
        executor.submit(make_step(1, [(1, 3, 0, True)], new=[thief]))


def test_a_copied_block_holds_what_its_source_held():
    executor = FakeExecutor()
    run(executor, make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    reader = make_row(1, number=1, token_ids=[*PROMPT[:4], 9], computed=4, blocks=(7, 8))
    run(executor, make_step(1, [(1, 1, 4, True)], new=[reader], copies=[BlockCopy(0, 7)]))


def test_growth_beyond_the_table_fails_without_new_blocks():
    grown = FakeExecutor(block_size=2)
    run(grown, make_step(0, [(0, 6, 0, True)], new=[make_row(blocks=(0, 1, 2))]))
    with pytest.raises(AssertionError, match=r"7 tokens do not fit into 3 blocks of 2"):
        grown.submit(make_step(1, [(0, 1, 6, True)]))
    run(grown, make_step(2, [(0, 1, 6, True)], grown=[NewBlocks(0, (3,))]))


def test_lag_bounds_the_unread_results():
    executor = FakeExecutor(lag=1)
    first = executor.submit(make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    executor.submit(make_step(1, [(0, 1, 6, True)]))
    with pytest.raises(AssertionError, match="2 results are unread, lag is 1"):
        executor.submit(make_step(2, [(0, 1, 7, True)]))
    assert first.result().token_ids.tolist() == executor.expected_tokens(PROMPT, 1)
    with pytest.raises(AssertionError, match="asked twice"):
        first.result()


@pytest.mark.parametrize(
    ("num_outputs", "message"),
    [(1, "the host cannot know"), (0, "before its last result was read")],
)
def test_readmission_with_an_unread_token_fails(num_outputs, message):
    executor = FakeExecutor(lag=1)
    executor.submit(make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    ids = PROMPT + executor.expected_tokens(PROMPT, num_outputs)
    again = make_row(token_ids=ids, num_prompt=6)
    with pytest.raises(AssertionError, match=message):
        executor.submit(make_step(1, [(0, len(ids), 0, True)], new=[again], released=[0]))


def test_readmission_goes_on_where_the_request_was():
    executor = FakeExecutor()
    tokens = run(executor, make_step(0, [(0, 6, 0, True)], new=[make_row()])).token_ids.tolist()
    run(executor, make_step(1, released=[0]))
    again = make_row(3, token_ids=PROMPT + tokens, num_prompt=6, blocks=(5, 6))
    tokens += run(executor, make_step(2, [(3, 7, 0, True)], new=[again])).token_ids.tolist()
    assert tokens == executor.expected_tokens(PROMPT, 2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (make_step(1), "is empty"),
        (make_step(0, [(0, 1, 6, True)]), "step ids must grow"),
        (make_step(1, [(0, 1, 5, True)]), "has 6 computed tokens, the step says 5"),
        (make_step(1, [(0, 2, 6, True)]), "has no token 7 yet"),
        (make_step(1, [(0, 1, 6, False)]), "sample must be True"),
        (make_step(1, [(1, 1, 0, True)]), "nobody has it"),
        (make_step(1, released=[1]), "nobody has it"),
        (make_step(1, new=[make_row(0, number=1)]), "taken by two requests"),
        (make_step(1, new=[make_row(1)]), "has two rows"),
        (make_step(1, new=[make_row(1, number=1, computed=6)]), "nothing is left to compute"),
        (make_step(1, new=[make_row(1, number=1, blocks=(64,))]), "block 64 does not exist"),
        (make_step(1, new=[make_row(1, number=1, blocks=(3, 3))]), "a block twice"),
    ],
)
def test_broken_steps_fail(step, message):
    executor = FakeExecutor()
    run(executor, make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    with pytest.raises(AssertionError, match=message):
        executor.submit(step)


def test_faults_come_on_demand():
    executor = FakeExecutor(faults=Faults(submit={1}, result={2}, non_finite={0: 7}))
    run(executor, make_step(0, [(0, 6, 0, True)], new=[make_row()]))
    with pytest.raises(RuntimeError, match="submit of step 1"):
        executor.submit(make_step(1, [(0, 1, 6, True)]))
    failing = executor.submit(make_step(2, [(0, 1, 6, True)]))
    assert failing.outcome.row_errors == {0: "non-finite logits"}
    with pytest.raises(RuntimeError, match="result of step 2"):
        failing.result()


def test_prompt_logprobs_name_their_positions():
    executor = FakeExecutor()
    row = make_row(num_prompt_logprobs=1, num_logprobs=0)
    chunk = run(executor, make_step(0, [(0, 4, 0, False)], new=[row]))
    last = run(executor, make_step(1, [(0, 2, 4, True)]))
    entries = chunk.prompt_logprobs[0] + last.prompt_logprobs[0]
    assert [entry.rank for entry in entries] == [1, 2, 3, 4, 5]
    assert [int(entry.ids[0]) for entry in entries] == PROMPT[1:]
    assert last.logprobs[0].ids.tolist() == last.token_ids.tolist()
