"""A thread launches on the engine's stream and is then as it was before, on two faked devices."""

from types import SimpleNamespace

import pytest
import torch

from octavo.executor.streams import create_stream, launching_on

OURS = SimpleNamespace(device_index=1)


@pytest.fixture
def cuda(monkeypatch):
    """The current device, and each device's current stream."""
    state = SimpleNamespace(
        device=0, streams=[SimpleNamespace(device_index=index) for index in range(2)]
    )

    def set_stream(stream):
        state.streams[stream.device_index] = stream
        state.device = stream.device_index

    monkeypatch.setattr("torch.cuda.current_device", lambda: state.device)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: setattr(state, "device", device))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: state.streams[device])
    monkeypatch.setattr("torch.cuda.set_stream", set_stream)
    return state


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_stream_device_and_mode_are_the_threads_own_again(cuda, device, error):
    cuda.device, before = device, list(cuda.streams)
    try:
        with launching_on(OURS):
            assert (cuda.device, cuda.streams[1]) == (1, OURS)
            assert torch.is_inference_mode_enabled()
            if error is not None:
                raise error
    except RuntimeError:
        pass
    assert (cuda.device, cuda.streams) == (device, before)
    assert not torch.is_inference_mode_enabled()


def test_the_interpreter_has_no_stream():
    stream = create_stream(torch.device("cpu"))
    with launching_on(stream):
        assert stream is None
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
