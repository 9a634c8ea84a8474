"""Records and edit lists hold what a NewRow says, word by word."""

import numpy as np

from octavo.executor.ops.row_parameters import (
    EDIT_LIST,
    LISTS,
    NUM_WORDS,
    PENALTIES,
    ROW_PARAMETERS,
    SEED,
    TEMPERATURE,
)
from octavo.executor.row_records import pack_edit_list, pack_record
from octavo.executor.step import RowSampling
from tests.steps import make_row


def read(record):
    return record.view(ROW_PARAMETERS)[0]


def test_a_record_is_one_cache_line_half_and_its_words_are_where_kernels_look():
    assert NUM_WORDS.value == 16
    assert (TEMPERATURE.value, SEED.value, EDIT_LIST.value) == (0, 4, 12)


def test_a_record_holds_the_parameters():
    new = make_row(
        2, num_prompt=4, temperature=0.5, top_k=2**40, top_p=0.9, min_p=0.1, seed=2**64 - 1
    )
    record = read(pack_record(new, edit_list_address=None))
    assert record["temperature"] == np.float32(0.5)
    assert record["top_k"] == 2**31 - 1
    assert (record["seed"], record["num_prompt_tokens"]) == (2**64 - 1, 4)
    assert (record["edits"], record["edit_list"]) == (0, 0)


def test_counts_beyond_a_word_are_the_largest_count():
    record = read(pack_record(make_row(0, min_tokens=2**31, top_k=2**63), edit_list_address=None))
    assert (record["min_tokens"], record["top_k"]) == (2**31 - 1, 2**31 - 1)


def test_a_record_tells_which_edits_there_are():
    penalised = make_row(0, repetition_penalty=1.1)
    assert read(pack_record(penalised, edit_list_address=None))["edits"] == PENALTIES
    both = read(pack_record(penalised, edit_list_address=2**47 + 8))
    assert (both["edits"], both["edit_list"]) == (PENALTIES | LISTS, 2**47 + 8)


def test_an_edit_list_holds_its_parts_in_order():
    sampling = RowSampling(
        seed=0,
        allowed_token_ids=(4, 5),
        held_back_ids=(9,),
        min_tokens=3,
        logit_bias=((6, 1.5),),
        bad_words_ids=((7, 8), (1,)),
    )
    bias = np.float32(1.5).view(np.int32)
    assert pack_edit_list(sampling).tolist() == [
        *(2, 1, 1, 2),
        *(4, 5),
        9,
        *(6, bias),
        *(2, 7, 8),
        *(1, 1),
    ]


def test_no_limit_differs_from_nothing_allowed():
    words = pack_edit_list(RowSampling(seed=0, logit_bias=((6, 0.0),)))
    assert words.tolist() == [-1, 0, 1, 0, 6, 0]
    assert pack_edit_list(RowSampling(seed=0, temperature=1.0)) is None
