"""Writes ``docs/configuration.md`` out of ``config.py``.

Run ``python -m octavo.entrypoints.cli.reference > docs/configuration.md`` after a change there.
"""

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_type_hints

from octavo.config import EngineConfig
from octavo.entrypoints.cli.options import KIND_NAMES, get_value_type
from octavo.entrypoints.vllm_keywords import NEUTRAL_VALUES

HEADER = """\
# Configuration

Every setting is a keyword of `LLM` and an option of the commands that start an engine:
`LLM(block_size=32)` is `--block-size 32`; a switch is `--enable-prefix-caching` or
`--no-enable-prefix-caching`. Where the default is empty, it is decided at start as the meaning
says. A value that is out of range, or does not fit the model or the machine, stops the start with
one sentence.

| setting | default | values | meaning |
|---|---|---|---|
"""
ENVIRONMENT = """
## Environment

| variable | meaning |
|---|---|
| `OCTAVO_DEFAULT_MODEL` | `.gguf` file or folder that is the default model; none is fetched then |
| `OCTAVO_CACHE_DIR` | where the default model and converted tokenizers are kept; else \
`$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo` |

Models from the Hub are kept by huggingface-hub, under its own variables.
"""
KEYWORDS = """
## vLLM's other keywords

`LLM` takes these at the values shown, so that a script which spells defaults out runs unchanged.
Any other value is refused, because Octavo does not have what it asks for.

| keyword | accepted |
|---|---|
"""


def render_configuration() -> str:
    """Return the document's text."""
    hints = get_type_hints(EngineConfig)
    settings = "".join(_render_setting(item, hints[item.name]) for item in fields(EngineConfig))
    keywords = "".join(_render_keywords())
    return HEADER + settings + ENVIRONMENT + KEYWORDS + keywords


def _render_setting(setting: Field[Any], hint: Any) -> str:
    choices = setting.metadata["choices"]
    values = ", ".join(f"`{choice}`" for choice in choices)
    values = values or KIND_NAMES[get_value_type(hint)]
    default = "" if setting.default is None else f"`{setting.default}`"
    return f"| `{setting.name}` | {default} | {values} | {setting.metadata['help']} |\n"


def _render_keywords() -> Iterator[str]:
    for name, values in NEUTRAL_VALUES.items():
        accepted = ", ".join(f"`{value!r}`" for value in values)
        yield f"| `{name}` | {accepted} |\n"


if __name__ == "__main__":
    print(render_configuration(), end="")
