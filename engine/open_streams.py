"""API process: the streams of all open requests, by the ids under which their clients know them.

A client's request with several prompts is several requests with keys of their own and one id.
"""

from collections.abc import Iterable, Sequence
from uuid import uuid4

from octavo.engine.open_request import OpenRequest
from octavo.engine.request_stream import PromptStream
from octavo.outputs import RequestOutput


class OpenStreams:
    """Owns the streams from their requests' admission to their final outputs."""

    def __init__(self) -> None:
        self._streams: dict[str, PromptStream] = {}
        self._batches: dict[str, dict[str, None]] = {}  # id -> keys, in order, of those still open

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """The ids of requests that have not ended, the oldest first."""
        return list(dict.fromkeys(stream.request_id for stream in self._streams.values()))

    def choose_id(self, request_id: str | None, num_prompts: int) -> tuple[str, list[str]]:
        """Return an id that no open request has, and a key for each prompt.

        The id is the client's own, told apart by a suffix where that is needed.
        """
        chosen = request_id or uuid4().hex
        keys = _name_prompts(chosen, num_prompts)
        is_taken = chosen in self._batches or any(key in self._streams for key in (chosen, *keys))
        if is_taken:
            return self.choose_id(f"{chosen}-{uuid4().hex}", num_prompts)
        return chosen, keys

    def open(self, request_id: str, keys: Sequence[str]) -> list[PromptStream]:
        """Return new streams, one for each prompt."""
        streams = [PromptStream(key, request_id) for key in keys]
        self._streams.update(zip(keys, streams, strict=True))
        if len(keys) > 1:
            self._batches[request_id] = dict.fromkeys(keys)
        return streams

    def find_keys(self, request_ids: Iterable[str]) -> list[str]:
        """Return the keys of everything open under these ids or keys."""
        return [key for name in request_ids for key in self._batches.get(name, (name,))]

    def deliver(self, owed: Sequence[OpenRequest | RequestOutput]) -> None:
        """Let the readers know; streams that have ended are forgotten."""
        for news in owed:
            stream = self._streams[news.request_id]
            stream.note(news)
            if news.finished:
                self._forget(stream)

    def _forget(self, stream: PromptStream) -> None:
        del self._streams[stream.key]
        batch = self._batches.get(stream.request_id)
        if batch is not None:
            batch.pop(stream.key, None)
            if not batch:
                del self._batches[stream.request_id]


def _name_prompts(request_id: str, num_prompts: int) -> list[str]:
    if num_prompts == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_prompts)]
