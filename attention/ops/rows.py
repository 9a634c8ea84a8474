"""The rows of a step as the kernels that plan it see them."""

import triton
import triton.language as tl

from octavo.attention.ops.sizes import next_power_of_2

LOOKED_UP = 16
"""Records that one program of a plan kernel makes: rows x 16 comparisons stay in registers."""


def pad_rows(num_rows: int) -> int:
    """Round the number of rows so that few variants of a plan kernel are compiled."""
    return 128 if num_rows <= 128 else max(1024, next_power_of_2(num_rows))


@triton.jit
def load_decodes(row, query_start_ptr, context_lengths_ptr, num_rows):
    """Return token and context length of rows with one token; the others have no context."""
    exists = row < num_rows
    token = tl.load(query_start_ptr + row, mask=exists, other=0)
    next_token = tl.load(query_start_ptr + row + 1, mask=exists, other=0)
    context = tl.load(context_lengths_ptr + row, mask=exists, other=0)
    return token, tl.where(next_token - token == 1, context, 0)


@triton.jit
def first_visible(context, WINDOW: tl.constexpr):
    """First of ``context`` tokens that the last one sees."""
    return context * 0 if WINDOW == 0 else tl.maximum(context - WINDOW, 0)
