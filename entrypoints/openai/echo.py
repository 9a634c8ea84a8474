"""The text of a prompt as a completion repeats it, and where its tokens begin in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.prompt import EncodedPrompt
from octavo.engine.tokenizer import Tokenizer
from octavo.entrypoints.openai.logprobs import TextOffsets


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt's text as its tokens spell it.

    What the tokenizer added by itself, such as BOS, is no part of the text. A character that is
    incomplete at the end is left to the answer.
    """

    text: str
    offsets: Sequence[int]
    """For each token of the prompt where it begins in the text."""

    @classmethod
    def read(
        cls, prompt: EncodedPrompt, tokenizer: Tokenizer, num_added: tuple[int, int]
    ) -> "Echo":
        """Spell a prompt; ``num_added`` are the tokenizer's own tokens before and behind it."""
        front, back = num_added
        token_ids = prompt.token_ids.tolist()
        own = token_ids[front : len(token_ids) - back]
        text = tokenizer.create_decoder(skip_special_tokens=False).decode(own)
        offsets = TextOffsets(tokenizer.create_decoder(skip_special_tokens=False))
        return cls(text, [0] * front + offsets.take(own) + [len(text)] * back)
