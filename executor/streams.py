"""The stream that all of an engine's work on a GPU runs on, in whichever thread launches it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def create_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of the device; None in Triton's interpreter."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub
    return stream


@contextmanager
def launching_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch what is within on ``stream``, in inference mode; then the thread is as it was before.

    Torch's own context manager is dear: it asks each time which kinds of device there are.
    """
    with torch.inference_mode():
        if stream is None:
            yield
            return
        device = torch.cuda.current_device()
        previous = torch.cuda.current_stream(stream.device_index)
        torch.cuda.set_stream(stream)  # and its device
        try:
            yield
        finally:
            torch.cuda.set_stream(previous)
            if device != stream.device_index:
                torch.cuda.set_device(device)
