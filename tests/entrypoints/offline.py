"""A model in this process, and what comes out of it: for tests that look at it from outside."""

import json
import shutil

from octavo import LLM, SamplingParams
from octavo.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def start(folder, **settings):
    """Start an engine with a pool of 64 blocks."""
    return LLM(str(folder), **{"num_gpu_blocks_override": 64, **settings})


def generate(llm, prompt="z", **params):
    """Return the first answer to one prompt, greedy unless asked otherwise."""
    params = SamplingParams(**{"temperature": 0, **params})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def stream(llm, prompt="z", **params):
    """Return the pieces of every answer, and their final pieces."""
    params = SamplingParams(**{"temperature": 0, "output_kind": RequestOutputKind.DELTA, **params})
    llm.llm_engine.add_request("streamed", prompt, params)
    pieces = [[] for _ in range(params.n)]
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            for answer in output.outputs:
                pieces[answer.index].append(answer)
    return pieces


def texts(pieces):
    return [piece.text for piece in pieces]


def write_generation_config(source, folder, **fields):
    """Copy a checkpoint and give it another generation_config.json."""
    shutil.copytree(source, folder)
    (folder / "generation_config.json").write_text(json.dumps(fields))
