"""What arrives through the rings, on a device that has done its work when a call returns."""

import numpy as np
import pytest
import torch

from octavo.executor.staging import NUM_SLOTS, ReadbackRing, UploadRing

CPU = torch.device("cpu")


@pytest.mark.parametrize("capacity", [1, 64, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.51, 1.0])
def test_all_words_that_are_sent_arrive(capacity, share):
    ring = UploadRing(capacity, CPU, None)
    num_words = max(1, int(share * capacity))
    for start in range(NUM_SLOTS + 1):
        values = np.arange(start, start + num_words)
        ring.take()[:num_words] = values
        ring.send(num_words)
        assert ring.device_words[:num_words].tolist() == values.tolist()


def test_what_is_read_back_stays_as_it_was_fetched():
    on_device = torch.zeros((2, 3), dtype=torch.int32)
    ring = ReadbackRing(on_device, None)
    fetched = []
    for value in range(NUM_SLOTS):
        on_device.fill_(value)
        fetched.append(ring.fetch())
    words = [readback.wait() for readback in fetched]
    ring.fetch()
    assert [array.tolist() for array in words] == [[value] * 6 for value in range(NUM_SLOTS)]
