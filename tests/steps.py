"""Builders of Steps written by hand."""

import numpy as np

from octavo.executor.step import NewRow, RowSampling, Step

PROMPT = [11, 12, 13, 14, 15, 16]


def make_row(
    row=0, *, number=0, token_ids=PROMPT, num_prompt=None, computed=0, blocks=(0, 1), **sampling
):
    """Build a NewRow; further keywords are fields of RowSampling."""
    ids = np.array(token_ids, dtype=np.int32)
    params = RowSampling(**{"seed": 0, **sampling})
    return NewRow(row, number, ids, num_prompt or len(ids), computed, tuple(blocks), params)


def make_step(step_id, scheduled=(), *, new=(), released=(), copies=(), grown=()):
    """Build a Step; ``scheduled`` holds (row, num_tokens, num_computed_tokens, sample) per row."""
    columns = list(zip(*scheduled, strict=True)) or [(), (), (), ()]
    rows, counts, computed = (np.array(column, dtype=np.int32) for column in columns[:3])
    return Step(
        step_id=step_id,
        released_rows=tuple(released),
        new_rows=tuple(new),
        copies=tuple(copies),
        new_blocks=tuple(grown),
        rows=rows,
        num_tokens=counts,
        num_computed_tokens=computed,
        sample=np.array(columns[3], dtype=np.bool_),
    )


def count_prompt_tokens(steps):
    """Return how many tokens of prompts the Steps of an engine computed, all from its start."""
    lengths, total = {}, 0
    for step in steps:
        lengths.update({new.row: new.num_prompt_tokens for new in step.new_rows})
        for row, count, computed in zip(
            step.rows, step.num_tokens, step.num_computed_tokens, strict=True
        ):
            total += max(0, min(int(count), lengths[int(row)] - int(computed)))
    return total
