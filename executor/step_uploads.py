"""Sends what a Step says of its rows to the device: four columns and the growth of block tables."""

from collections.abc import Sequence

from octavo.executor.staging import UploadRing
from octavo.executor.step import Int32Array, NewBlocks, NewRow, Step
from octavo.executor.step_program import COLUMN_WORDS, StepShape


class StepUploads:
    """Knows how long the rows' block tables are on the device."""

    def __init__(self, uploads: UploadRing, *, num_rows: int) -> None:
        self._uploads = uploads
        self._num_blocks = [0] * num_rows

    def note_row(self, new: NewRow) -> None:
        """Remember a row that was written whole."""
        self._num_blocks[new.row] = len(new.block_ids)

    def send(self, step: Step, shape: StepShape) -> None:
        """Send a step; rows of the shape beyond the step's are padding."""
        words = self._uploads.take()
        num_rows = len(step.rows)
        columns = words[: shape.ranges_start].reshape(COLUMN_WORDS, shape.num_rows)
        if num_rows < shape.num_rows:
            columns[0, num_rows:] = -1
            columns[1:, num_rows:] = 0
        columns[0, :num_rows] = step.rows
        columns[1, :num_rows] = step.num_tokens
        columns[2, :num_rows] = step.num_computed_tokens
        columns[3, :num_rows] = step.sample
        words[shape.ranges_start : shape.values_start] = 0
        end = shape.values_start
        if step.new_blocks:
            end = self._write_growth(words, step.new_blocks, shape)
        self._uploads.send(end)

    def send_padding(self, shape: StepShape) -> None:
        """Send a step without a row."""
        words = self._uploads.take()
        words[: shape.values_start] = 0
        words[: shape.num_rows] = -1
        self._uploads.send(shape.values_start)

    def _write_growth(
        self, words: Int32Array, new_blocks: Sequence[NewBlocks], shape: StepShape
    ) -> int:
        """Write ranges and values of growing tables; returns where the values end."""
        ranges: list[int] = []
        values: list[int] = []
        for growth in new_blocks:
            row, block_ids = growth.row, growth.block_ids
            num_blocks = self._num_blocks[row]
            ranges += (row, num_blocks, shape.values_start + len(values), len(block_ids))
            values += block_ids
            self._num_blocks[row] = num_blocks + len(block_ids)
        end = shape.values_start + len(values)
        words[shape.ranges_start : shape.ranges_start + len(ranges)] = ranges
        words[shape.values_start : end] = values
        return end
