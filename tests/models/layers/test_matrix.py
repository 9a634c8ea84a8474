"""A packed matrix multiplies as before; its plain weight is gone unless somebody else reads it."""

import pytest
import torch

from octavo.models.layers.matrix import Matrix

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


def make_matrix(dtype=torch.float32):
    matrix = Matrix(8, 16).to(dtype)
    generator = torch.Generator().manual_seed(1)
    matrix.weight.copy_(torch.randn(8, 16, generator=generator))
    return matrix


@pytest.mark.parametrize("keep_weight", [True, False])
def test_packing_changes_no_product(keep_weight):
    matrix = make_matrix()
    expected = matrix(X)
    matrix.pack(keep_weight=keep_weight)
    torch.testing.assert_close(matrix(X), expected)
    assert len(list(matrix.parameters())) == keep_weight


def test_packing_again_changes_nothing():
    matrix = make_matrix()
    expected = matrix(X)
    matrix.pack()
    matrix.pack()
    torch.testing.assert_close(matrix(X), expected)


def test_a_type_that_is_not_packed_keeps_its_weight():
    matrix = make_matrix(torch.float64)
    expected = matrix(X.double())
    matrix.pack()
    assert torch.equal(matrix(X.double()), expected)
    assert len(list(matrix.parameters())) == 1


def test_a_stored_value_that_is_no_number_makes_its_output_none():
    matrix = Matrix(8, 16, rounded_to=torch.float8_e4m3fn)
    matrix.weight.copy_(torch.ones(8, 16))
    matrix.weight[3, 5] = torch.nan
    matrix.scale.fill_(1.0)
    matrix.pack()
    assert matrix(X).isnan().all(dim=0).tolist() == [index == 3 for index in range(8)]
