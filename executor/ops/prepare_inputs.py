"""Inputs of a step, gathered on the device from the rows and the Step's four columns.

One launch. A program, or several for a long chunk, takes one scheduled row and needs of the others
only their token counts; 16 bytes a row are uploaded::

    Step columns    row 7: 1 token | row 2: 3 tokens | row 5: 1 token | -1: padding
    query_start     0              1                 4                5 (5)
    input_ids       t              t  t  t           t                0 0 0   to the graph's size
    slots           s              s  s  s           s                -1 -1 -1

Padding rows have context length 0 and no token; padding tokens have slot -1, id 0 and position 0.
Rows that sample are packed to the front of the sampled columns; row -1 fills the rest.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs
from octavo.attention.ops.rows import pad_rows
from octavo.attention.ops.sizes import cdiv

TILE = 1024
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's inputs at fixed addresses, padded to the size of a graph. Written whole each time.

    Block tables are copied as far as a row's context reaches; what lies beyond is left over.
    """

    input_ids: Tensor  # (num_tokens,) int32
    attention: AttentionInputs
    sampled_rows: Tensor  # (num_rows,) int32
    sampled_tokens: Tensor  # (num_rows,) int32, index into the flat batch of the row's last token
    sampled_positions: Tensor  # (num_rows,) int32, where in its request the sampled token will be

    @classmethod
    def create(
        cls, num_rows: int, num_tokens: int, *, max_num_blocks: int, device: torch.device | str
    ) -> "DeviceBatch":
        """Allocate for one size of graph."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            input_ids=empty(num_tokens),
            attention=AttentionInputs(
                query_start=empty(num_rows + 1),
                context_lengths=empty(num_rows),
                # Attention may read a table to its end before it knows the context: valid ids.
                block_tables=torch.zeros(
                    (num_rows, max_num_blocks), dtype=torch.int32, device=device
                ),
                positions=empty(num_tokens),
                slot_mapping=empty(num_tokens, dtype=torch.int64),
            ),
            sampled_rows=empty(num_rows),
            sampled_tokens=empty(num_rows),
            sampled_positions=empty(num_rows),
        )


def prepare_inputs(
    columns: Tensor,
    *,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
    out: DeviceBatch,
    max_row_tokens: int = 1,
) -> None:
    """Fill ``out`` for the step whose columns, (4, num_rows) int32, are rows, num_tokens,
    num_computed_tokens and sample, each row padded with -1, 0, 0, 0.

    ``token_ids`` and ``block_tables`` are those of DeviceRows. ``max_row_tokens``, the longest
    chunk of the step, only says how many programs share a row. Nothing is allocated.
    """
    attention = out.attention
    num_rows = columns.shape[1]
    assert attention.context_lengths.shape[0] == num_rows, "columns are padded to the batch's rows"
    num_splits = min(MAX_SPLITS, cdiv(max_row_tokens, TILE))
    # The last program of the first axis pads the tokens.
    _prepare_kernel[(num_rows + 1, num_splits)](
        columns,
        token_ids,
        block_tables,
        out.input_ids,
        attention.query_start,
        attention.context_lengths,
        attention.block_tables,
        attention.positions,
        attention.slot_mapping,
        out.sampled_rows,
        out.sampled_tokens,
        out.sampled_positions,
        num_rows,
        out.input_ids.shape[0],
        token_ids.stride(0),
        block_tables.stride(0),
        attention.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS_PAD=pad_rows(num_rows),
        TILE=TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_batch_tokens"])
def _prepare_kernel(
    columns_ptr,  # (4, num_rows)
    row_token_ids_ptr,
    row_tables_ptr,
    input_ids_ptr,
    query_start_ptr,
    context_lengths_ptr,
    tables_ptr,
    positions_ptr,
    slots_ptr,
    sampled_rows_ptr,
    sampled_tokens_ptr,
    sampled_positions_ptr,
    num_rows,
    num_batch_tokens,
    stride_row_token_ids,
    stride_row_tables,
    stride_tables,
    BLOCK_SIZE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS_PAD)
    is_before = rows < index
    counts = tl.load(columns_ptr + num_rows + rows, mask=is_before, other=0)
    first_token = tl.sum(counts)
    if index == num_rows:
        tl.store(query_start_ptr + index, first_token)
        for start in range(first_token + split * TILE, num_batch_tokens, TILE * tl.num_programs(1)):
            tokens = start + tl.arange(0, TILE)
            is_padding = tokens < num_batch_tokens
            tl.store(input_ids_ptr + tokens, 0, mask=is_padding)
            tl.store(positions_ptr + tokens, 0, mask=is_padding)
            tl.store(slots_ptr + tokens, -1, mask=is_padding)
        return
    row = tl.load(columns_ptr + index).to(tl.int64)
    num_tokens = tl.load(columns_ptr + num_rows + index)
    num_computed = tl.load(columns_ptr + 2 * num_rows + index)
    context = num_computed + num_tokens
    if split == 0:
        tl.store(query_start_ptr + index, first_token)
        tl.store(context_lengths_ptr + index, context)
        sampled = tl.load(columns_ptr + 3 * num_rows + rows, mask=rows < num_rows, other=0)
        place = tl.sum(tl.where(is_before, sampled, 0))
        is_sampled = tl.load(columns_ptr + 3 * num_rows + index) > 0
        # The rows that do not sample fill the places behind those that do.
        place = tl.where(is_sampled, place, tl.sum(sampled) + index - place)
        tl.store(sampled_rows_ptr + place, tl.where(is_sampled, row, -1).to(tl.int32))
        tl.store(sampled_tokens_ptr + place, tl.where(is_sampled, first_token + num_tokens - 1, 0))
        tl.store(sampled_positions_ptr + place, tl.where(is_sampled, context, 0))
    if row < 0:
        return
    row_table_ptr = row_tables_ptr + row * stride_row_tables
    for start in range(split * TILE, tl.cdiv(context, BLOCK_SIZE), TILE * tl.num_programs(1)):
        blocks = start + tl.arange(0, TILE)
        is_block = blocks < tl.cdiv(context, BLOCK_SIZE)
        block_ids = tl.load(row_table_ptr + blocks, mask=is_block, other=0)
        table_ptr = tables_ptr + index.to(tl.int64) * stride_tables
        tl.store(table_ptr + blocks, block_ids, mask=is_block)
    for start in range(split * TILE, num_tokens, TILE * tl.num_programs(1)):
        offsets = start + tl.arange(0, TILE)
        is_token = offsets < num_tokens
        positions = num_computed + offsets
        source_ptr = row_token_ids_ptr + row * stride_row_token_ids + positions
        ids = tl.load(source_ptr, mask=is_token, other=0)
        block_ids = tl.load(row_table_ptr + positions // BLOCK_SIZE, mask=is_token, other=0)
        slots = block_ids.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        tl.store(input_ids_ptr + first_token + offsets, ids, mask=is_token)
        tl.store(positions_ptr + first_token + offsets, positions, mask=is_token)
        tl.store(slots_ptr + first_token + offsets, slots, mask=is_token)
