"""The default model beside transformers in float32: the same greedy tokens, also under pressure."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "def fibonacci(n):",
    "Once upon a time, in a small village near the sea,",
]
COUNTING = [f"{', '.join(str(10 * i + j) for j in range(1, 7))}," for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(smollm2):
    """Prompts as token ids, and what transformers generates from them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    network = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    with torch.inference_mode():
        outputs = [
            network.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]
    return prompts, outputs


@pytest.fixture(scope="module")
def plain_counting(smollm2):
    """What the counting prompts give with room for all."""
    return generate(smollm2, COUNTING, GREEDY, max_model_len=192)[0]


def generate(smollm2, prompts, params, **settings):
    """Return each prompt's tokens, and how often a request was retracted."""
    with LLM(str(smollm2), dtype="float32", device="cpu", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    num_retractions = sum(output.metrics.num_retractions for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], num_retractions


def test_greedy_tokens_are_those_of_transformers(smollm2, expected):
    prompts, outputs = expected
    # transformers' min_new_tokens masks the end token; so does min_tokens here.
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    assert generate(smollm2, prompts, params, max_model_len=256)[0] == outputs


@pytest.mark.parametrize(("caching", "budget"), [(False, None), (True, 32)])
def test_counting_goes_on_unharmed_by_retraction(smollm2, plain_counting, caching, budget):
    pressed, num_retractions = generate(
        smollm2,
        COUNTING,
        GREEDY,
        max_model_len=192,
        num_gpu_blocks_override=12,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        schedule_conservativeness=0,
    )
    assert num_retractions > 0
    assert pressed == plain_counting
