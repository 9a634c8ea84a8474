"""API process: what Octavo uses of a Hugging Face tokenizer.

A type of its own, for transformers takes seconds to import: only ``tokenizer_loader`` names it, and
a start does without it until it has something to wait for.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer


class HFTokenizer(Protocol):
    """A tokenizer of transformers; there is more to it than this."""

    chat_template: Any  # a text, or texts by name
    eos_token_id: Any
    is_fast: bool

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens beside the vocabulary, by id."""

    @property
    def backend_tokenizer(self) -> BackendTokenizer:
        """The tokenizer in Rust, of a fast one."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Special tokens by their roles."""

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return a text's ids."""

    def decode(self, token_ids: list[int], **options: bool) -> str | list[str]:
        """Return the text of some ids."""

    def convert_ids_to_tokens(self, ids: list[int]) -> str | list[str]:
        """Return tokens as they stand in the vocabulary."""

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[Any] | None = None
    ) -> str:
        """Return the template to render with."""
