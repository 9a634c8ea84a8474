"""Weights reach their device whole, whatever their shape and type."""

import pytest
import torch

from octavo.errors import ModelLoadError
from octavo.models import upload
from octavo.models.upload import Write, write_all

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_part_is_written_and_converted(device, monkeypatch):
    monkeypatch.setattr(
        upload, "_BUFFER_BYTES", 4096
    )  # several rounds, and rows that do not fit evenly
    whole = torch.randn(300, 70)
    sources = [whole, whole[:, 10:30], whole[:, 0], whole[:0], whole[5:6]]
    targets = [torch.full(s.shape, torch.nan, dtype=torch.bfloat16, device=device) for s in sources]
    work = [Write(target, lambda s=s: s) for target, s in zip(targets, sources, strict=True)]
    write_all(work, torch.device(device))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.bfloat16())


def test_error_of_a_reader_ends_the_load():
    def fail():
        raise ModelLoadError("the file is gone")

    with pytest.raises(ModelLoadError, match="the file is gone"):
        write_all([Write(torch.empty(1), fail)], torch.device("cpu"))
