"""API process: the bytes that each token of a byte-level or byte-fallback tokenizer stands for."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled in as ids are seen. Ids without a token stand for nothing."""

    def __init__(self, tokenizer: FastTokenizer, scheme: "ByteScheme") -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._scheme = scheme

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else self._scheme.spell(token)
        self[token_id] = data
        return data


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """How a tokenizer writes bytes, and how many spaces it takes from the beginning of a text."""

    spell: Callable[[str], bytes]
    num_spaces_stripped: int = 0


def read_byte_scheme(tokenizer: FastTokenizer) -> ByteScheme | None:
    """Recognise the tokenizer's decoder; None when its tokens have no bytes of their own."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] if step else None for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteScheme(_spell_byte_level)
    if kinds[:2] == ["Replace", "ByteFallback"] and set(kinds[2:]) <= {"Fuse", "Strip"}:
        return _read_byte_fallback(steps)
    return None


def _read_byte_fallback(steps: list[dict[str, Any]]) -> ByteScheme | None:
    """Read sentencepiece's form: a visible character for spaces, ``<0x..>`` for rare characters."""
    pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
    strips = [step for step in steps if step["type"] == "Strip"]
    if pattern is None or any(strip["content"] != " " or strip["stop"] for strip in strips):
        return None

    def spell(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(pattern, content).encode()

    return ByteScheme(spell, num_spaces_stripped=sum(strip["start"] for strip in strips))


def _spell_byte_level(token: str) -> bytes:
    """Undo GPT-2's mapping of bytes to printable characters; an added token may be plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _map_characters_to_bytes() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    mapping = {chr(byte): byte for byte in printable}
    mapping.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return mapping


_BYTE_OF_CHARACTER = _map_characters_to_bytes()
