"""The shared checkpoints have the token ids and greedy outputs that other tests rely on."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(folder, *, num_tokens):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("z").input_ids
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer, ids[-num_tokens:]


def test_tokenizer_has_the_ids_of_a_sentencepiece_one(tiny_spm):
    tokenizer = AutoTokenizer.from_pretrained(tiny_spm)
    assert len(tokenizer) == 345
    assert tokenizer("hi").input_ids == [1, 259, 267, 268]
    assert tokenizer("").input_ids == [1]


def test_chat_template_prints_bos(tiny_spm):
    tokenizer = AutoTokenizer.from_pretrained(tiny_spm)
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 22
    assert ids[:2] == [1, 259]


def test_tied_model_has_its_known_greedy_output(tiny_tied):
    assert greedy(tiny_tied, num_tokens=5)[1] == [295, 156, 5, 113, 86]


@pytest.mark.parametrize(
    ("name", "text"), [("chain_letters", "abcdefghij"), ("chain_emoji", "😀    b")]
)
def test_chain_model_walks_its_path(name, text, request):
    folder = request.getfixturevalue(name)
    num_tokens = 11 if name == "chain_letters" else 7
    tokenizer, ids = greedy(folder, num_tokens=num_tokens)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text


def test_halfchar_chain_ends_inside_a_character(chain_halfchar):
    tokenizer, ids = greedy(chain_halfchar, num_tokens=4)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<0xF0>", "<0x9F>", "</s>"]


def test_sharded_checkpoint_has_an_index_and_several_files(tiny_sharded):
    assert len(list(tiny_sharded.glob("model-*.safetensors"))) > 1
    assert (tiny_sharded / "model.safetensors.index.json").exists()
