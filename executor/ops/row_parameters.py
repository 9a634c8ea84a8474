"""What the kernels must know of a row's request: one record of 64 bytes, written at admission.

The records of all rows are one int32 tensor, (num_rows, NUM_WORDS); the dtype below is its layout
on the host. A kernel reads a field as a word: ``load_float(parameters_ptr, row, TEMPERATURE)``.
"""

import numpy as np
import triton
import triton.language as tl

ROW_PARAMETERS = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repetition_penalty", "<f4"),
        ("min_tokens", "<i4"),
        ("num_prompt_tokens", "<i4"),
        ("edits", "<i4"),
        ("edit_list", "<u8"),  # device address of the row's edit list, see ops/edit_logits.py
        ("unused", "<i4", 2),
    ]
)

PENALTIES = tl.constexpr(
    1
)  # bits of ``edits``: what changes the row's logits before they are sampled
LISTS = tl.constexpr(2)


def _word(name: str) -> tl.constexpr:
    fields = ROW_PARAMETERS.fields
    assert fields is not None
    return tl.constexpr(fields[name][1] // 4)


NUM_WORDS = tl.constexpr(ROW_PARAMETERS.itemsize // 4)
TEMPERATURE = _word("temperature")
TOP_K = _word("top_k")
TOP_P = _word("top_p")
MIN_P = _word("min_p")
SEED = _word("seed")
PRESENCE_PENALTY = _word("presence_penalty")
FREQUENCY_PENALTY = _word("frequency_penalty")
REPETITION_PENALTY = _word("repetition_penalty")
MIN_TOKENS = _word("min_tokens")
NUM_PROMPT_TOKENS = _word("num_prompt_tokens")
EDITS = _word("edits")
EDIT_LIST = _word("edit_list")


@triton.jit
def load_filter(parameters_ptr, row, vocab_size):
    """Return (temperature, top_k, top_p, min_p, is_filtered, is_edited) of a row.

    ``top_k`` is 0 when it limits nothing; only a row with a temperature is filtered.
    """
    record_ptr = parameters_ptr + row * NUM_WORDS
    temperature = tl.load(record_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(record_ptr + TOP_K)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(record_ptr + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(record_ptr + MIN_P).to(tl.float32, bitcast=True)
    is_filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    is_edited = tl.load(record_ptr + EDITS) != 0
    return temperature, top_k, top_p, min_p, is_filtered, is_edited
