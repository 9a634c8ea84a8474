"""The look-up in an 8-bit embedding against torch."""

import pytest
import torch

from octavo.models.ops.eight_bits import FP8, INT8, dequantize_rows, quantize_rows
from octavo.models.ops.embedding import look_up

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("size", [64, 100])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rounded_to", [FP8, INT8])
def test_rows_are_those_of_the_dequantised_embedding(rounded_to, dtype, id_type, size):
    weight, scale = quantize_rows(torch.randn(50, size, device=DEVICE), rounded_to)
    ids = torch.tensor([49, 0, 7, 7], dtype=id_type, device=DEVICE)
    found = look_up(ids, weight, scale, dtype)
    assert torch.equal(found, dequantize_rows(weight, scale, dtype)[ids.long()])


def test_without_ids_nothing_is_launched():
    weight, scale = quantize_rows(torch.randn(5, 16, device=DEVICE))
    ids = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert look_up(ids, weight, scale, torch.float32).shape == (0, 16)
