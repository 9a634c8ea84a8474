"""Host memory for what travels between host and device, in rings guarded by events.

A slot of a ring is written again only after the device has passed the event recorded behind its
last use; on the device, one buffer is enough, for all copies and kernels run on one stream.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.executor.step import Int32Array

NUM_SLOTS = 3
"""One that the device reads, one behind it, one that the host fills."""


@dataclass(slots=True)
class Slot:
    """One buffer of int32 words, page-locked where the device is a GPU."""

    memory: Tensor
    words: Int32Array
    free: "torch.cuda.Event | PassedEvent"

    @classmethod
    def create(cls, capacity: int, device: torch.device) -> "Slot":
        """Allocate; the event is passed until it is recorded."""
        is_cuda = device.type == "cuda"
        memory = torch.empty(capacity, dtype=torch.int32, pin_memory=is_cuda)
        return cls(memory, memory.numpy(), _create_event(is_cuda=is_cuda))


class PassedEvent:
    """The event of a device that has done its work when a call returns: Triton's interpreter."""

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is awaited."""


class UploadRing:
    """Carries int32 words to a device buffer of the same capacity, whose address never changes.

    What is copied has one of a few lengths, powers of two, for which tensors are kept.
    """

    def __init__(
        self, capacity: int, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self.capacity = capacity
        self.device_words = torch.empty(capacity, dtype=torch.int32, device=device)
        self._stream = stream
        self._slots = [Slot.create(capacity, device) for _ in range(NUM_SLOTS)]
        self._targets = _slice_to_powers(self.device_words)
        self._sources = [_slice_to_powers(slot.memory) for slot in self._slots]
        self._next = 0

    def take(self) -> Int32Array:
        """Return the words of the next slot, to be filled and then sent."""
        slot = self._slots[self._next]
        slot.free.synchronize()
        return slot.words

    def send(self, num_words: int) -> None:
        """Copy the first words of the taken slot to the device, on the stream, which is current.

        Up to as many more are written, with whatever lies behind them in the slot.
        """
        place = self._next
        self._next = (place + 1) % NUM_SLOTS
        power = (num_words - 1).bit_length()
        self._targets[power].copy_(self._sources[place][power], non_blocking=True)
        self._slots[place].free.record(self._stream)


class ReadbackRing:
    """Brings a device tensor back; a slot is read by the host before its turn comes again."""

    def __init__(self, device_words: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._source = device_words.view(-1)
        self._stream = stream
        capacity, device = len(self._source), device_words.device
        self._slots = [Slot.create(capacity, device) for _ in range(NUM_SLOTS)]
        self._next = 0

    def fetch(self) -> "Readback":
        """Start to copy, on the stream, which is current."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        slot.memory.copy_(self._source, non_blocking=True)
        slot.free.record(self._stream)
        return Readback(slot)


@dataclass(frozen=True, slots=True)
class Readback:
    """Words on their way to the host."""

    slot: Slot

    def wait(self) -> Int32Array:
        """Wait for the copy and return an array of its own."""
        self.slot.free.synchronize()
        return self.slot.words.copy()


def to_device(values: Int32Array, device: torch.device) -> Tensor:
    """Upload a small array without waiting for the device."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _slice_to_powers(words: Tensor) -> list[Tensor]:
    """Return the first 1, 2, 4 and so on of the words, and all of them last."""
    return [words[: 2**power] for power in range((len(words) - 1).bit_length() + 1)]


def _create_event(*, is_cuda: bool) -> "torch.cuda.Event | PassedEvent":
    if not is_cuda:
        return PassedEvent()
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
    return event
