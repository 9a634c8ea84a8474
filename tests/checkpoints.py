"""Builders of tiny checkpoints, saved to disk by transformers so that it can serve as the oracle.

All share one tokenizer that behaves like a sentencepiece one. Weights depend on the seed alone; the
greedy outputs of a chain model are known by construction.
"""

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
BOS_ID, EOS_ID = 1, 2
VOCAB_SIZE = 345
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Build a BPE tokenizer with '▁' for spaces, byte fallback, prefix space and automatic <s>.

    Ids: three special tokens, the 256 bytes, single characters, then the results of the merges.
    """
    single = "▁" + string.ascii_letters + string.digits + ".,:;!?\"'{}[]()-_"
    merges = [
        ("▁", "▁"),
        ("▁▁", "▁▁"),
        ("▁", "a"),
        ("▁", "b"),
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
    ]
    pieces = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *single]
    pieces += [left + right for left, right in merges]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(model_type: str = "llama", **changes: object) -> PreTrainedConfig:
    """Return a two-layer config, 4 query and 2 KV heads of 16; ``changes`` are its fields."""
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "initializer_range": 0.4,
    }
    return AutoConfig.for_model(model_type, **{**values, **changes})


def build_random_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Build a model whose weights are drawn from ``config.initializer_range`` and ``seed``."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build_chain_model(pieces: Sequence[str], *, hidden_size: int = 128) -> PreTrainedModel:
    """Build a Llama whose greedy output after ``pieces[0]`` is ``pieces[1:]``, then </s>.

    Attention and MLP add nothing, so the hidden state is the embedding of the last token, and the
    head maps it to the token's successor. Pieces must be distinct.
    """
    path = build_tokenizer().convert_tokens_to_ids(list(pieces))
    assert len(set(path)) == len(path), pieces
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    ).eval()
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, hidden_size), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for token, successor in zip(path, [*path[1:], EOS_ID], strict=True):
            model.lm_head.weight[successor] += 2 * embedding[token]
    return model


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "1GB",
) -> Path:
    """Save model and tokenizer as a user's checkpoint folder and return the folder."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    build_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
