"""Writes ``docs/configuration.md`` out of the settings of the engine and the server.

Run ``python -m octavo.entrypoints.cli.reference > docs/configuration.md`` after a change of them.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from octavo.config import EngineConfig
from octavo.entrypoints.cli.options import FLAG_ALIASES, KIND_NAMES, get_value_type
from octavo.entrypoints.cli.vllm_options import list_missing
from octavo.entrypoints.server_settings import ServerSettings
from octavo.entrypoints.vllm_keywords import NEUTRAL_VALUES

HEADER = """\
# Configuration

Every setting is a keyword of `LLM` and an option of the commands that start an engine:
`LLM(block_size=32)` is `--block-size 32`; a switch is `--enable-prefix-caching` or
`--no-enable-prefix-caching`. Where the default is empty, it is decided at start as the meaning
says. A value that is out of range, or does not fit the model or the machine, stops the start with
one sentence and exit status 2. On the command line numbers may have a unit: `8k` is 8,000, `8K` is
8,192, and so on with `m`, `g` and `t`; `auto` leaves a number without a default to Octavo.

## The engine

| setting | default | values | meaning |
|---|---|---|---|
"""
SERVER = """
## The server

Options of `octavo serve` alone. Texts are given as several values or as a JSON list.

| setting | default | values | meaning |
|---|---|---|---|
"""
FILE = """
`octavo serve --config FILE.yaml` reads options from a file, under their long names with dashes or
underscores; what the command line says wins:

    model: HuggingFaceTB/SmolLM2-135M-Instruct
    max-model-len: 8k
    served-model-name: [small, default]
    enforce-eager: true
"""
ENVIRONMENT = """
## Environment

| variable | meaning |
|---|---|
| `OCTAVO_DEFAULT_MODEL` | `.gguf` file or folder that is the default model; none is fetched then |
| `OCTAVO_CACHE_DIR` | where the default model, converted tokenizers, rounded weights and compiled \
operations are kept; else `$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo` |
| `OCTAVO_API_KEY` | keys of `octavo serve`, with commas between them; `octavo chat` and its like \
send the first |
| `VLLM_API_KEY` | the same for one key, where `OCTAVO_API_KEY` is not set |

Models from the Hub are kept by huggingface-hub, under its own variables.
"""
KEYWORDS = """
## vLLM's other keywords and flags

`LLM` and `octavo serve` take these at the values shown, so that what spells defaults out runs
unchanged. Any other value is refused, because Octavo does not have what it asks for.

| keyword of `LLM` | accepted |
|---|---|
"""
FLAGS = """
| flag of `vllm serve` | accepted |
|---|---|
"""
ALIASES = """
These flags have another name here, and both are understood:

| `vllm serve` | `octavo serve` |
|---|---|
"""
OTHER_NAMES = {
    "--disable-uvicorn-access-log": "--no-access-log",
    "--cudagraph-capture-sizes 1 2 4": "--cuda-graph-sizes 1,2,4",
}


def render_configuration() -> str:
    """Return the document's text."""
    parts = (
        HEADER,
        *_render_settings(EngineConfig),
        SERVER,
        *_render_settings(ServerSettings),
        FILE,
        ENVIRONMENT,
        KEYWORDS,
        *_render_keywords(),
        FLAGS,
        *_render_flags(),
        ALIASES,
        *_render_aliases(),
    )
    return "".join(parts)


def _render_settings(settings: type[EngineConfig | ServerSettings]) -> Iterator[str]:
    hints = get_type_hints(settings)
    for setting in fields(settings):
        yield _render_setting(setting, hints[setting.name])


def _render_setting(setting: Field[Any], hint: Any) -> str:
    choices = setting.metadata["choices"]
    values = ", ".join(f"`{choice}`" for choice in choices)
    values = values or KIND_NAMES[get_value_type(hint)]
    default = _render_default(setting.default)
    return f"| `{setting.name}` | {default} | {values} | {setting.metadata['help']} |\n"


def _render_default(default: Any) -> str:
    if default in (None, MISSING, "", ()):
        return ""
    return f"`{json.dumps(default)}`" if isinstance(default, tuple) else f"`{default}`"


def _render_keywords() -> Iterator[str]:
    for name, values in NEUTRAL_VALUES.items():
        accepted = ", ".join(f"`{value!r}`" for value in values)
        yield f"| `{name}` | {accepted} |\n"


def _render_flags() -> Iterator[str]:
    for name, values in list_missing().items():
        flag = name.replace("_", "-")
        if any(isinstance(value, bool) for value in values):
            accepted = [f"`--{flag}`" if value else f"`--no-{flag}`" for value in values]
        else:
            accepted = [f"`{value}`" if value != "" else "nothing" for value in values]
        yield f"| `--{flag}` | {', '.join(dict.fromkeys(accepted))} |\n"


def _render_aliases() -> Iterator[str]:
    for name, flags in FLAG_ALIASES.items():
        for flag in flags:
            yield f"| `{flag}` | `--{name.replace('_', '-')}` |\n"
    for theirs, ours in OTHER_NAMES.items():
        yield f"| `{theirs}` | `{ours}` |\n"


if __name__ == "__main__":
    print(render_configuration(), end="")
