"""Networks whose matrices are integers, on a CPU."""

import gguf
import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import rounding
from octavo.models.rotation import rotate_residual_stream
from octavo.models.rounding import can_round, is_stored_in_int4, round_network
from tests.models.gguf_files import write_gguf
from tests.models.oracle import attend_in_float32, compute_logits, load, source_of

IDS = torch.tensor([1, 259, 285, 344, 0, 100])
FORMATS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("folder", ["tiny_spm", "tiny_padded_vocab"])
def test_a_rotated_network_computes_the_same(folder, request):
    source = source_of(request.getfixturevalue(folder))
    rotated = load(source)
    before = rotated.embed_tokens.matrix.weight.clone()
    rotate_residual_stream(rotated)
    assert not torch.allclose(rotated.embed_tokens.matrix.weight, before, atol=1e-3)
    expected = compute_logits(load(source), IDS)
    torch.testing.assert_close(compute_logits(rotated, IDS), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_rounded_network_computes_nearly_the_same(name, tiny_spm, tmp_path):
    if not can_round(name):
        pytest.skip(f"this CPU does not compute in {name}")
    source = source_of(write_gguf(tiny_spm, tmp_path / "m.gguf", kind=FORMATS.Q4_1), "gguf")
    model = load(source)
    round_network(model, name)
    model.pack()
    expected = compute_logits(load(source), IDS)
    hidden = model(IDS, attend_in_float32)
    error = (model.compute_logits(hidden) - expected).norm() / expected.norm()
    assert 0 < error < 0.05
    assert not [weight for weight in model.layers.parameters() if weight.dim() > 1]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_cpu_without_the_instructions_is_refused(name, tiny_spm, monkeypatch):
    monkeypatch.setattr(rounding, "can_round", lambda name: False)
    with pytest.raises(ConfigError, match=f"quantization is {name}, which needs a CPU with AVX"):
        round_network(load(source_of(tiny_spm)), name)


@pytest.mark.parametrize(
    ("kind", "is_int4"), [(FORMATS.Q4_1, True), (FORMATS.Q4_0, False), (FORMATS.Q8_0, False)]
)
def test_a_file_of_four_bits_is_known_by_its_format(kind, is_int4, tiny_spm, tmp_path):
    path = write_gguf(tiny_spm, tmp_path / "model.gguf", kind=kind)
    assert is_stored_in_int4(source_of(path, "gguf")) == is_int4
    assert not is_stored_in_int4(source_of(tiny_spm))
