"""bfloat16 and float16 on a GPU beside transformers: how far from float32 each of the two is."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from tests.checkpoints import build_random_model, tiny_config

pytestmark = pytest.mark.gpu

TOLERANCE = 1.5
"""Our mean error, as a multiple of that of transformers in the same type."""
IDS = (torch.arange(600) * 37 % 3989 + 3).tolist()
QWEN3_8B = {
    "vocab_size": 4096,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.04,
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Two layers of Qwen3-8B's shape, as a path and keywords of from_pretrained."""
    folder = tmp_path_factory.mktemp("wide")
    build_random_model(tiny_config("qwen3", **QWEN3_8B)).to(torch.bfloat16).save_pretrained(folder)
    return str(folder), {"pretrained_model_name_or_path": folder}


@pytest.fixture(scope="module")
def default_model(smollm2):
    """The default model, in the same form."""
    keywords = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    return str(smollm2), keywords


def theirs(keywords, dtype):
    """Log-probabilities that transformers gives to the tokens of the prompt behind the first."""
    network = AutoModelForCausalLM.from_pretrained(**keywords, dtype=dtype).cuda()
    with torch.inference_mode():
        logits = network(torch.tensor([IDS], device="cuda")).logits[0, :-1].float()
    return pick(logits.log_softmax(-1))


def pick(logprobs):
    return logprobs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].cpu()


def ours(path, dtype, **settings):
    """The same from the engine, the prompt in chunks of different lengths."""
    llm = LLM(
        path,
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        max_num_batched_tokens=250,
        max_num_seqs=8,
        **settings,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)[0]
    llm.shutdown()
    entries = zip(IDS[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token_id].logprob for token_id, entry in entries])


@pytest.mark.parametrize("model", ["wide_model", "default_model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_as_close_to_float32_as_those_of_transformers(model, dtype, request):
    path, keywords = request.getfixturevalue(model)
    exact = theirs(keywords, torch.float32)
    their_error = (theirs(keywords, dtype) - exact).abs().mean()
    error = (ours(path, dtype) - exact).abs().mean()
    assert error <= TOLERANCE * their_error, f"{error:.2e}, transformers {their_error:.2e}"


MAX_DISTANCE = {"quantization": 0.3, "kv_cache_dtype": 0.25}
"""As on a CPU, and a little for activations of 8 bits."""


@pytest.mark.parametrize("setting", MAX_DISTANCE)
def test_8_bits_change_little_of_what_the_default_model_thinks(setting, default_model):
    path, _ = default_model
    plain, changed = (ours(path, torch.bfloat16, **some) for some in ({}, {setting: "fp8"}))
    assert 0.01 < (plain - changed).abs().mean() < MAX_DISTANCE[setting]
