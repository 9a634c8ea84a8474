"""Kernels that start before the one in front has ended change no token.

That they read nothing too early is seen in their machine code: tests/test_early_loads.py.
"""

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.attention.ops import decode, store_kv
from octavo.models.ops import activation, gemv, norm
from tests.checkpoints import tiny_config

pytestmark = pytest.mark.gpu

MODULES = (store_kv, decode, norm, activation, gemv)
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


def generate(folder):
    """Sample from one request, which is a row alone, in the model's own graphs."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=128,
        max_num_seqs=4,
    )
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=300, ignore_eos=True, detokenize=False
    )
    prompt = {"prompt_token_ids": list(range(100, 300))}
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for _ in range(3)]
    llm.shutdown()
    return [list(output.token_ids) for output in outputs]


def test_starting_early_changes_no_token(folder, monkeypatch):
    early = generate(folder)
    for module in MODULES:
        monkeypatch.setattr(module, "can_start_early", lambda x: False)
    late = generate(folder)
    assert len(set(late[0])) > 100
    assert early == late
