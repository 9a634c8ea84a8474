"""What fewer bits cost: the same texts scored with and without them; one JSON line.

The texts are this repository's documents, cut into pieces of ``--tokens``. Every token is predicted
from those before it, by the model as it is stored and with the options given, and compared: how
often both find the same token the most likely one, how far the log-probabilities of the actual
tokens are apart, and the perplexities.

usage: python benchmarks/quality.py [MODEL] [--quantization fp8] [--kv-cache-dtype fp8]
           [--tokens 512] [--pieces 40]
"""

import argparse
import json
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.engine.prompt import TokensPrompt

ROOT = Path(__file__).parent.parent
POOL_BYTES = 2**30

Scores = list[tuple[float, int]]
"""For each token its log-probability, and the most likely token in its place."""


def main() -> None:
    """Score twice and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pieces", type=int, default=40)
    args = parser.parse_args()
    plain = score(args)
    changed = score(args, quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    line = {"benchmark": "quality", "commit": commit, **vars(args), **compare(plain, changed)}
    print(json.dumps(line), flush=True)


def score(args: argparse.Namespace, **settings: Any) -> Scores:
    """Return the scores of all tokens but the first of each piece."""
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.tokens + 16,
        max_num_seqs=8,
        kv_cache_memory_bytes=POOL_BYTES,
        **settings,
    )
    prompts = [
        TokensPrompt(prompt_token_ids=piece) for piece in cut_texts(llm, args.tokens, args.pieces)
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    scores = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        assert output.prompt_token_ids is not None
        for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if entries:
                best = next(one for one, entry in entries.items() if entry.rank == 1)
                scores.append((entries[token].logprob, best))
    return scores


def cut_texts(llm: LLM, num_tokens: int, num_pieces: int) -> list[list[int]]:
    """Return pieces of the documents."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    ids = llm.get_tokenizer().encode(text)
    return [ids[start : start + num_tokens] for start in range(0, len(ids), num_tokens)][
        :num_pieces
    ]


def compare(plain: Scores, changed: Scores) -> dict[str, float | int]:
    """Return the distances between two scorings of the same tokens."""
    pairs = list(zip(plain, changed, strict=True))
    return {
        "num_tokens": len(pairs),
        "same_best_token": round(statistics.mean(a[1] == b[1] for a, b in pairs), 4),
        "mean_distance": round(statistics.mean(abs(a[0] - b[0]) for a, b in pairs), 4),
        "perplexity": round(find_perplexity(plain), 3),
        "perplexity_changed": round(find_perplexity(changed), 3),
    }


def find_perplexity(scores: Scores) -> float:
    """Return exp of the mean surprise."""
    return math.exp(-statistics.mean(logprob for logprob, _ in scores))


if __name__ == "__main__":
    main()
