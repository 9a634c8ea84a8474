"""A descriptor made without Triton's constructor is what the constructor makes."""

from dataclasses import fields

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.ops.descriptors import LAYOUT, describe


def test_a_descriptor_has_all_fields_that_triton_gives_it():
    matrix = torch.zeros(6, 64, dtype=torch.bfloat16)
    found = describe(matrix, matrix.shape, matrix.stride(), (4, 64))
    expected = TensorDescriptor(matrix, [6, 64], [64, 1], [4, 64], LAYOUT)
    assert found.base is matrix
    for field in fields(TensorDescriptor)[1:]:
        assert getattr(found, field.name) == getattr(expected, field.name)
