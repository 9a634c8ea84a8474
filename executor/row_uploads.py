"""Writes admitted requests into the rows of the device: any number of them in one upload."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.executor.device_rows import DeviceRows
from octavo.executor.ops.row_parameters import NUM_WORDS, ROW_PARAMETERS
from octavo.executor.ops.write_rows import write_rows
from octavo.executor.row_records import pack_edit_list, pack_record
from octavo.executor.staging import UploadRing
from octavo.executor.step import Int32Array, NewRow

RANGE_WORDS = 4
NUM_TARGETS = 3  # token ids, block tables, records


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A NewRow as words, and the device memory that its edit list is copied to."""

    new: NewRow
    block_ids: Int32Array
    record: Int32Array
    edit_list: Int32Array | None
    edit_memory: Tensor | None

    @property
    def num_words(self) -> int:
        """Words that it takes in an upload."""
        num_edit_words = 0 if self.edit_list is None else len(self.edit_list)
        num_values = len(self.new.token_ids) + len(self.block_ids) + len(self.record)
        return NUM_TARGETS * RANGE_WORDS + num_values + num_edit_words


class RowUploads:
    """Owns the edit lists on the device: a record holds the address of its row's."""

    def __init__(self, rows: DeviceRows, uploads: UploadRing) -> None:
        self._rows = rows
        self._uploads = uploads
        self._edit_memory: dict[int, Tensor] = {}
        self.edited: set[int] = set()
        """Rows whose logits are edited before sampling."""

    def release(self, row: int) -> None:
        """Forget a row; its memory may be reused by what is launched later."""
        self.edited.discard(row)
        self._edit_memory.pop(row, None)

    def write(self, new_rows: Sequence[NewRow]) -> None:
        """Write rows whole, on the current stream."""
        batch: list[PackedRow] = []
        num_words = 0
        for new in new_rows:
            packed = self._pack(new)
            if num_words + packed.num_words > self._uploads.capacity:
                self._send(batch)
                batch, num_words = [], 0
            batch.append(packed)
            num_words += packed.num_words
        if batch:
            self._send(batch)

    def _pack(self, new: NewRow) -> PackedRow:
        edit_list = pack_edit_list(new.sampling)
        memory = None
        if edit_list is not None:
            device = self._uploads.device_words.device
            memory = torch.empty(len(edit_list), dtype=torch.int32, device=device)
            self._edit_memory[new.row] = memory
        address = None if memory is None else memory.data_ptr()
        record = pack_record(new, edit_list_address=address)
        assert len(record) == NUM_WORDS.value
        if record.view(ROW_PARAMETERS)["edits"][0]:
            self.edited.add(new.row)
        return PackedRow(new, np.array(new.block_ids, np.int32), record, edit_list, memory)

    def _send(self, batch: Sequence[PackedRow]) -> None:
        words = self._uploads.take()
        num_rows = len(batch)
        ranges = words[: NUM_TARGETS * RANGE_WORDS * num_rows]
        ranges = ranges.reshape(NUM_TARGETS, num_rows, RANGE_WORDS)
        start = ranges.size
        edits: list[tuple[Tensor, int]] = []
        for index, packed in enumerate(batch):
            values = (packed.new.token_ids, packed.block_ids, packed.record)
            for target, array in enumerate(values):
                ranges[target, index] = (packed.new.row, 0, start, len(array))
                words[start : start + len(array)] = array
                start += len(array)
            if packed.edit_list is not None and packed.edit_memory is not None:
                words[start : start + len(packed.edit_list)] = packed.edit_list
                edits.append((packed.edit_memory, start))
                start += len(packed.edit_list)
        self._uploads.send(start)
        self._spread(num_rows, edits)

    def _spread(self, num_rows: int, edits: Sequence[tuple[Tensor, int]]) -> None:
        """Copy what has been uploaded to its places."""
        uploaded = self._uploads.device_words
        rows = self._rows
        for index, target in enumerate((rows.token_ids, rows.block_tables, rows.parameters)):
            first = index * num_rows * RANGE_WORDS
            ranges = uploaded[first : first + num_rows * RANGE_WORDS].view(num_rows, RANGE_WORDS)
            write_rows(target, ranges, uploaded)
        for memory, start in edits:
            memory.copy_(uploaded[start : start + len(memory)])
