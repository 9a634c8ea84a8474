"""How much JSON is read at most: reading it holds up every other client.

Text is cheap, values are not: 32 MiB of empty lists take seconds and a gigabyte.
"""

import re

from octavo.entrypoints.http.errors import HttpError

MAX_BODY_BYTES = 32 * 2**20
MAX_BODY_VALUES = 2**20
"""About how many values are read in a tenth of a second; lists, objects and keys count as four."""
EXTRA_WEIGHT = 3
MAX_BODY_DEPTH = 200
"""Lists and objects inside of each other, the body being the first; the parser has this limit."""

_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""JSON strings. Whatever the bytes are, each is looked at once."""


def check_declared_size(content_length: str | None) -> None:
    """Refuse a body before it is sent.

    Raises:
        HttpError: its headers say that it is too long (413).
    """
    if content_length is not None and int(content_length) > MAX_BODY_BYTES:
        raise refuse_size()


def check_num_values(data: bytearray) -> None:
    """Refuse a body before it is parsed.

    Raises:
        HttpError: it has too many values (413).
    """
    if len(data) * (1 + EXTRA_WEIGHT) <= MAX_BODY_VALUES or _weigh(data) <= MAX_BODY_VALUES:
        return
    # What was counted may be in texts. Their quotes are bounded, because each costs time as well.
    if data.count(b'"') > MAX_BODY_VALUES or _weigh(_TEXTS.sub(b"", data)) > MAX_BODY_VALUES:
        raise HttpError(413, f"the body has more than {MAX_BODY_VALUES} values")


def refuse_size() -> HttpError:
    """Return the refusal of a body that is too long."""
    return HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def _weigh(data: bytes | bytearray) -> int:
    num_heavy = sum(map(data.count, (b":", b"[", b"{")))
    return data.count(b",") + EXTRA_WEIGHT * num_heavy
