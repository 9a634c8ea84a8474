"""What K/V of fewer bits lose of a long text: numbers hidden in it are asked for; JSON lines.

Sentences with a number each are spread over this repository's documents, cut to ``--contexts``
tokens. Behind the whole text each is asked for, and answered greedily, with the cache as it is by
default and with ``--kv-cache-dtype``. All questions share the text's K/V.

usage: python benchmarks/retrieval.py [MODEL] [--kv-cache-dtype fp8] [--contexts 1024 4096]
"""

import argparse
import json
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.engine.prompt import TokensPrompt

ROOT = Path(__file__).parent.parent
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Kyoto", "Paris", "Quito", "Rome", "Seoul", "Tunis")
POOL_TOKENS = 2048
"""Room for the questions beside the text."""
NUM_ANSWER_TOKENS = 8


def main() -> None:
    """Ask twice and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    for context in args.contexts:
        numbers = random.Random(context).sample(range(1000, 10_000), len(CITIES))
        plain = ask(args.model, context, numbers, kv_cache_dtype="auto")
        changed = ask(args.model, context, numbers, kv_cache_dtype=args.kv_cache_dtype)
        line = {
            "benchmark": "retrieval",
            "commit": commit,
            "model": args.model,
            "context": context,
            "kv_cache_dtype": args.kv_cache_dtype,
            "asked": len(numbers),
            "found": count_found(plain, numbers),
            "found_changed": count_found(changed, numbers),
            "same_answers": sum(a == b for a, b in zip(plain, changed, strict=True)),
        }
        print(json.dumps(line), flush=True)


def ask(
    model: str | None, context: int, numbers: Sequence[int], *, kv_cache_dtype: str
) -> list[str]:
    """Return the answer to each question."""
    max_model_len = context + 64
    llm = LLM(
        model,
        max_model_len=max_model_len,
        max_num_seqs=len(CITIES),
        num_gpu_blocks_override=(max_model_len + POOL_TOKENS) // 16,
        kv_cache_dtype=kv_cache_dtype,
    )
    tokenizer = llm.get_tokenizer()
    text = hide(tokenizer.encode(read_documents()), context, numbers, tokenizer.encode)
    prompts = [
        TokensPrompt(prompt_token_ids=text + tokenizer.encode(f"\nThe secret number of {city} is"))
        for city in CITIES
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER_TOKENS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def hide(
    ids: Sequence[int], context: int, numbers: Sequence[int], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return ``context`` tokens of the text, with the sentences at equal distances."""
    sentences = [
        encode(f"\nThe secret number of {city} is {number}.\n")
        for city, number in zip(CITIES, numbers, strict=True)
    ]
    length = (context - sum(map(len, sentences))) // len(sentences)
    pieces = [ids[start : start + length] for start in range(0, length * len(sentences), length)]
    return [
        token
        for piece, sentence in zip(pieces, sentences, strict=True)
        for token in (*piece, *sentence)
    ]


def read_documents() -> str:
    """Return the text in which the sentences are hidden."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


def count_found(answers: Sequence[str], numbers: Sequence[int]) -> int:
    """Return how many answers begin with their number."""
    pairs = zip(answers, numbers, strict=True)
    return sum(answer.strip().startswith(str(number)) for answer, number in pairs)


if __name__ == "__main__":
    main()
