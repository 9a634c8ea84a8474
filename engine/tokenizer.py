"""API process: text to token ids and back, around one Hugging Face tokenizer.

Chat templates are in ``chat_template``, the life of a growing text in ``detokenizer``.
"""

from collections.abc import Sequence
from functools import cached_property, partial

from octavo.engine.detokenizer import ByteDecoder, TextDecoder, WindowDecoder
from octavo.engine.hf_tokenizer import HFTokenizer
from octavo.engine.token_bytes import ByteScheme, TokenBytes, read_byte_scheme

MAX_COMPOSED_CHARACTERS = 4
"""So many characters of a text may become one when a tokenizer normalises it."""
_SAMPLE = "octavo"


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, hf_tokenizer: HFTokenizer) -> None:
        self.hf_tokenizer = hf_tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in hf_tokenizer.added_tokens_decoder.items()
            if token.special
        )
        self._scheme = _read_scheme(hf_tokenizer)
        if self._scheme is not None:
            self._bytes = TokenBytes(hf_tokenizer.backend_tokenizer, self._scheme)
            self._visible_bytes = TokenBytes(hf_tokenizer.backend_tokenizer, self._scheme)
            self._visible_bytes.update(dict.fromkeys(self.special_ids, b""))

    @property
    def num_tokens(self) -> int:
        """How many token ids have a token; a model may have more rows."""
        return len(self.hf_tokenizer)

    @property
    def eos_id(self) -> int | None:
        """The end-of-text token that the tokenizer names."""
        eos_id: int | None = self.hf_tokenizer.eos_token_id
        return eos_id

    @cached_property
    def num_added_tokens(self) -> tuple[int, int]:
        """How many tokens ``encode`` adds to every text, before and behind it."""
        bare, full = self.encode(_SAMPLE, add_special_tokens=False), self.encode(_SAMPLE)
        num_added = len(full) - len(bare)
        starts = range(num_added + 1)
        front = next((i for i in starts if full[i : i + len(bare)] == bare), num_added)
        return front, num_added - front

    @cached_property
    def max_characters_per_token(self) -> int:
        """The most characters of a text that one token stands for."""
        tokenizer = self.hf_tokenizer
        is_verbatim = tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer is None
        num_composed = 1 if is_verbatim else MAX_COMPOSED_CHARACTERS
        return num_composed * max(map(len, tokenizer.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids; ``add_special_tokens`` adds those that every text gets, as BOS."""
        # verbose=False: the limit that counts is the engine's, not the one stored with a tokenizer.
        ids: list[int] = self.hf_tokenizer.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids: what a ``Detokenizer`` gives in pieces."""
        decoder = self.create_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.decode(token_ids) + decoder.flush()

    def create_decoder(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> TextDecoder:
        """Return a decoder for one text.

        Where tokens are bytes, there never is a space between special tokens that is not a token.
        """
        if self._scheme is not None:
            token_bytes = self._visible_bytes if skip_special_tokens else self._bytes
            return ByteDecoder(token_bytes, self._scheme.num_spaces_stripped)

        return WindowDecoder(
            partial(
                self._decode,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which may be part of a character."""
        if self._scheme is not None:
            return self._bytes[token_id]
        return self._decode([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """Return a token as text for display; an incomplete character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as they stand in the vocabulary, spaces and bytes in its own signs."""
        names = self.hf_tokenizer.convert_ids_to_tokens(list(token_ids))
        assert isinstance(names, list)  # a string only for a single id
        return names

    def _decode(self, token_ids: list[int], **options: bool) -> str:
        text = self.hf_tokenizer.decode(token_ids, clean_up_tokenization_spaces=False, **options)
        assert isinstance(text, str)  # a list only for a batch
        return text


def _read_scheme(hf_tokenizer: HFTokenizer) -> ByteScheme | None:
    return read_byte_scheme(hf_tokenizer.backend_tokenizer) if hf_tokenizer.is_fast else None
