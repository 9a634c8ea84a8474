"""The offline class with the default model, a real one."""

import statistics

import pytest
import torch
from torch.nn import functional

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.models.ops.eight_bits import INT8, dequantize_rows, quantize_rows
from octavo.models.rounding import can_round
from tests.entrypoints.offline import GREEDY, generate
from tests.models.oracle import compute_logits, load, source_of
from tests.source_tree import ROOT


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(str(smollm2), max_model_len=512, num_gpu_blocks_override=64) as llm:
        yield llm


def run(llm, prompt, params):
    """Return the texts of one prompt under several parameters, run together."""
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_tiny_temperatures_are_greedy(llm):
    params = [
        SamplingParams(temperature=temperature, top_p=1e-4, seed=seed, max_tokens=6)
        for temperature in (1e-4, 1e-6, 1e-30)
        for seed in (1, 2)
    ]
    assert set(run(llm, "1, 2, 3, 4, 5,", params)) == {" 6, 7,"}


def test_only_repetition_penalty_counts_the_prompt(llm):
    penalties = ({}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0})
    params = [
        SamplingParams(temperature=0, max_tokens=1, **penalty)
        for penalty in (*penalties, {"repetition_penalty": 2.0})
    ]
    for _ in range(2):  # the second time the prompt is cached
        assert run(llm, "1, 2, 3, 4, 5, 6, 7, 8, 9,", params) == [" ", " ", " ", " and"]


def test_text_stops_at_a_string_of_several_tokens_and_never_in_the_prompt(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop=["8, 9"]),
        SamplingParams(temperature=0, max_tokens=6, stop=["5,"]),
    ]
    assert run(llm, "1, 2, 3, 4, 5,", params) == [" 6, 7, ", " 6, 7,"]


def test_content_may_be_text_or_parts(llm):
    question = "What is the capital of France?"
    parts = [{"type": "text", "text": question}]
    chats = [[{"role": "user", "content": content}] for content in (question, parts)]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [37, 37]
    assert {output.outputs[0].text for output in outputs} == {"The capital of France is Paris."}


def test_end_token_waits_for_min_tokens(llm):
    for min_tokens, num_tokens in ((4, 5), (0, 1)):
        answer = generate(
            llm, "Hello, my name is", logit_bias={2: 100.0}, min_tokens=min_tokens, max_tokens=8
        )
        assert len(answer.token_ids) == num_tokens


@pytest.mark.parametrize("prompt", ["", {"prompt": ""}])
def test_empty_prompt_has_nothing_to_continue(llm, prompt):
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.generate(prompt, GREEDY)
    assert generate(llm, "Hello", max_tokens=1).token_ids


TEXT = """\
The river rises in the hills north of the town, where three springs meet in a shallow pool. From
there it runs south through meadows and past two old mills, one of which still grinds corn in the
autumn. Below the second mill the valley widens, and the water slows down until it reaches the lake.
Fishermen say that the best days are those after rain, when the current brings down insects from the
trees. In winter the lake freezes along its banks, and children skate on it although their parents
tell them not to.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "max_distance"),
    [
        ({"quantization": "fp8"}, 0.25),
        # Beside matrices in four bits the first word of the answer is a toss-up: 1e-7 decides it.
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, 0.25),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, 0.35),
    ],
)
def test_8_bits_change_little_of_what_it_thinks_of_a_text(settings, max_distance, llm, smollm2):
    plain, plain_answer = score(llm)
    with LLM(str(smollm2), max_model_len=512, num_gpu_blocks_override=64, **settings) as small:
        changed, answer = score(small)
    assert answer == plain_answer
    distances = [abs(a - b) for a, b in zip(plain, changed, strict=True)]
    assert 0.01 < sum(distances) / len(distances) < max_distance
    assert abs(sum(plain) - sum(changed)) / len(plain) < 0.1  # of a perplexity's logarithm


@pytest.mark.slow
def test_a_vocabulary_in_integers_changes_little_of_what_it_thinks_of_a_document(llm, smollm2):
    """The bounds that docs/quantization.md states."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids = torch.tensor(llm.get_tokenizer().encode(text)[:1_000])
    model = load(source_of(smollm2, "gguf"))
    weight = model.embed_tokens.matrix.weight
    exact = functional.log_softmax(compute_logits(model, ids), dim=-1)
    weight.copy_(dequantize_rows(*quantize_rows(weight, INT8), torch.float32))
    rounded = functional.log_softmax(compute_logits(model, ids), dim=-1)
    divergence = functional.kl_div(rounded, exact, log_target=True, reduction="none").sum(dim=-1)
    assert 0.0005 < divergence.mean() < 0.004
    assert (exact.argmax(dim=-1) == rounded.argmax(dim=-1)).float().mean() > 0.95
    surprise, changed = (x[:-1].gather(1, ids[1:, None]).mean() for x in (exact, rounded))
    assert abs(surprise - changed) < 0.005


def score(llm):
    """Return the log-probabilities of the text's tokens, and an answer to a question."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([TEXT], params, use_tqdm=False)
    tokens = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat([question], GREEDY, use_tqdm=False)
    return [entry[token].logprob for token, entry in tokens if entry], answer.outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_integers_keep_what_the_default_model_thinks_of_documents(name, smollm2):
    """The bounds within which a rounded model may be a default."""
    if not can_round(name):
        pytest.skip(f"this CPU does not compute in {name}")
    exact, exact_best = score_documents(smollm2, dtype="float32")
    rounded, rounded_best = score_documents(smollm2, quantization=name)
    assert abs(statistics.mean(exact) - statistics.mean(rounded)) < 0.01
    same = [a == b for a, b in zip(exact_best, rounded_best, strict=True)]
    assert statistics.mean(same) > {"int4": 0.95, "int8": 0.93}[name]


def score_documents(path, **settings):
    """Return the log-probability of each token of two documents, and the likeliest in its place."""
    texts = [(ROOT / name).read_text(encoding="utf-8")[:4_000] for name in ("LICENSE", "README.md")]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    scores, best = [], []
    with LLM(str(path), max_model_len=2_048, num_gpu_blocks_override=256, **settings) as llm:
        for output in llm.generate(texts, params, use_tqdm=False):
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            for token, entries in pairs:
                if entries:
                    scores.append(entries[token].logprob)
                    best.append(next(one for one, entry in entries.items() if entry.rank == 1))
    return scores, best
