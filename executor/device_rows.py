"""The device's counterpart of Rows: what every running request has on the device, one row each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.block_manager.block_table import BlockSpec, blocks_needed
from octavo.executor.ops.row_parameters import NUM_WORDS


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """State of the rows. Steps gather from it on the device; it is never an input of the network.

    ``token_ids[row]`` holds the request's prompt and outputs in order; ``sample`` appends to it, so
    the token a step needs is there whether or not the host has seen it. How long a row is, and how
    much of it is computed, comes with each Step: what lies beyond is left over from earlier
    requests, in ``token_ids`` as in ``block_tables``.
    """

    token_ids: Tensor  # (num_rows, max_model_len) int32
    block_tables: Tensor  # (num_rows, max_num_blocks) int32
    parameters: Tensor  # (num_rows, NUM_WORDS) int32: records of ROW_PARAMETERS

    @classmethod
    def create(
        cls, num_rows: int, *, max_model_len: int, block_size: int, device: torch.device | str
    ) -> "DeviceRows":
        """Allocate; contents are undefined until a row is written."""

        def empty(width: int) -> Tensor:
            return torch.empty((num_rows, width), dtype=torch.int32, device=device)

        return cls(
            token_ids=empty(max_model_len),
            block_tables=empty(blocks_needed(BlockSpec(block_size), max_model_len)),
            parameters=empty(NUM_WORDS.value),
        )
