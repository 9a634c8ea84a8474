"""Kernels that start before the one in front has ended change no token.

That they read nothing too early is seen in their machine code: tests/test_early_loads.py.
"""

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.attention.ops import decode, store_kv
from octavo.models.ops import activation, gemv, linear_hopper, norm
from tests.checkpoints import tiny_config

pytestmark = pytest.mark.gpu

MODULES = (store_kv, decode, norm, activation, gemv, linear_hopper)
QWEN3_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few layers of Qwen3-0.6B's shape, without weights."""
    folder = tmp_path_factory.mktemp("shape")
    config = tiny_config("qwen3", **QWEN3_0_6B).to_dict()
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def generate(folder, *, num_requests):
    """Sample from requests that decode together, in the model's own graphs."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=2048,
        max_num_seqs=64,
    )
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=300, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(range(100 + i, 300))} for i in range(num_requests)]
    runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(3)]
    llm.shutdown()
    return [list(answer.outputs[0].token_ids) for answers in runs for answer in answers]


@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_starting_early_changes_no_token(num_requests, folder, monkeypatch):
    early = generate(folder, num_requests=num_requests)
    for module in MODULES:
        monkeypatch.setattr(module, "can_start_early", lambda x, **_: False)
    late = generate(folder, num_requests=num_requests)
    assert len(set(late[0])) > 100
    assert early == late
