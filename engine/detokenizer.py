"""API process: token ids become text, one at a time, and stop strings are found in it.

Text is released in whole characters, and no part of a stop string is released while it could still
be completed. What is released piece by piece joins to exactly what one call over all ids gives.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE_BYTES = 3  # a character has up to four
WINDOW = 5  # tokens that show how the next one is joined to them


class Detokenizer:
    """Owns the text of one answer.

    Without stop strings, tokens are decoded only when their text is asked for.
    """

    def __init__(self, decoder: "TextDecoder", stops: "StopStrings | None" = None) -> None:
        self._decoder = decoder
        self._stops = stops
        self._unread_ids: list[int] = []
        self._released: list[str] = []

    def append(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that it completed, which ends the text."""
        if self._stops is None:
            self._unread_ids.append(token_id)
            return None
        self._released.append(self._stops.push(self._decoder.decode((token_id,))))
        return self._stops.found

    def finish(self) -> None:
        """Release what was held back; an incomplete character becomes U+FFFD."""
        if self._stops is not None:
            if self._stops.found is not None:
                return  # the text ends there
            self._released.append(self._stops.flush())
        self._released.append(self._decoder.decode(self._unread_ids) + self._decoder.flush())
        self._unread_ids.clear()

    def take(self) -> str:
        """Return the text released since the last call."""
        if self._unread_ids:
            self._released.append(self._decoder.decode(self._unread_ids))
            self._unread_ids.clear()
        text = "".join(self._released)
        self._released.clear()
        return text


class StopStrings:
    """Cuts the text at the first stop string that ends, and holds back what may become one.

    There is one push for each token, and the result does not depend on how they split the text.
    Before ``min_tokens`` of them nothing is looked for: a complete stop string passes as text.
    """

    def __init__(
        self, stop_strings: Sequence[str], *, include_in_output: bool, min_tokens: int
    ) -> None:
        self.found: str | None = None
        self._matchers = [StopMatcher(stop) for stop in stop_strings]
        self._include_in_output = include_in_output
        self._num_unwatched = max(min_tokens - 1, 0)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is safe to release: with a complete stop string, all up to it."""
        ends = [(matcher.push(text), matcher.stop) for matcher in self._matchers]
        matches = [(end, -len(stop), stop) for end, stop in ends if end is not None]
        num_before = len(self._held)
        text = self._held + text
        if self._num_unwatched:
            self._num_unwatched -= 1
        elif matches:
            end, _, self.found = min(matches)  # the first that ends, the longest of several
            end += num_before
            self._held = ""
            return text[: end if self._include_in_output else end - len(self.found)]
        num_free = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[num_free:]
        return text[:num_free]

    def flush(self) -> str:
        """Return what is held back; no more text will come."""
        text, self._held = self._held, ""
        return text


class StopMatcher:
    """Follows one stop string through a text, however the text is split: Knuth-Morris-Pratt.

    Time is linear in the text. The table of borders grows only as far as a text has matched, so a
    long stop string that the text never begins costs nothing.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """How much of the text's end may become the stop string; always less than all of it."""
        self._borders = [0, 0]  # [n]: how long a proper beginning of stop[:n] also ends it

    def push(self, text: str) -> int | None:
        """Take the next text; return the position in it at which the stop string first ends."""
        stop, borders, num_matched = self.stop, self._borders, self.num_matched
        if not num_matched and stop[0] not in text:
            return None  # nearly every token
        first_end = None
        for end, character in enumerate(text, 1):
            while num_matched and stop[num_matched] != character:
                num_matched = borders[num_matched]
            if stop[num_matched] == character:
                num_matched += 1
                if num_matched == len(borders):
                    self._add_border()
            if num_matched == len(stop):
                num_matched = borders[num_matched]
                first_end = end if first_end is None else first_end
        self.num_matched = num_matched
        return first_end

    def _add_border(self) -> None:
        stop, borders = self.stop, self._borders
        last = len(borders) - 1
        border = borders[last]
        while border and stop[border] != stop[last]:
            border = borders[border]
        borders.append(border + (stop[border] == stop[last]))


class TextDecoder(Protocol):
    """Turns a stream of token ids into text; holds back what may be part of a character."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Continue after these tokens, whose own text is never returned."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the replacement of an incomplete character at the end."""


class ByteDecoder:
    """Decodes tokens that stand for bytes whatever their neighbours: byte-level BPE, byte fallback.

    ``num_spaces_stripped`` is how many spaces the tokenizer takes from the beginning of a text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], num_spaces_stripped: int = 0) -> None:
        self._token_bytes = token_bytes
        self._num_spaces_stripped = num_spaces_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Continue after these tokens."""
        if any(map(self._token_bytes.__getitem__, prompt_ids)):
            self._num_spaces_stripped = 0
        self.decode(prompt_ids[-MAX_INCOMPLETE_BYTES:])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        data = b"".join(map(self._token_bytes.__getitem__, token_ids))
        return self._strip(self._utf8.decode(data))

    def flush(self) -> str:
        """Return the replacement of an incomplete character at the end."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._num_spaces_stripped or not text:
            return text
        rest = text
        while self._num_spaces_stripped and rest.startswith(" "):
            rest = rest[1:]
            self._num_spaces_stripped -= 1
        if rest:
            self._num_spaces_stripped = 0
        return rest


class WindowDecoder:
    """Decodes for tokenizers whose tokens depend on their neighbours.

    A token's text is the difference between the last few tokens decoded with and without it.
    """

    def __init__(self, decode_ids: Callable[[list[int]], str]) -> None:
        self._decode_ids = decode_ids
        self._window: list[int] = []
        self._num_read = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Continue after these tokens."""
        self._window = list(prompt_ids[-WINDOW:])
        self._num_read = len(self._window)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            before = self._decode_ids(self._window[: self._num_read])
            after = self._decode_ids(self._window)
            # Ends inside a character: its bytes decode to U+FFFD until the last one is there.
            if len(after) > len(before) and not after.endswith(REPLACEMENT):
                pieces.append(after[len(before) :])
                self._window = self._window[self._num_read :]
                self._num_read = len(self._window)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the replacement of an incomplete character at the end."""
        before = self._decode_ids(self._window[: self._num_read])
        return self._decode_ids(self._window)[len(before) :]
