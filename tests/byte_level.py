"""A byte-level BPE tokenizer of the GPT-2 family, small enough to be written down."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with every byte, a few merges, no BOS, and one added token that is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "he"), ("l", "l"), ("Ġhe", "ll"), ("Ã", "©"), ("ð", "Ł")]
    pieces = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken("<tool 日本>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
