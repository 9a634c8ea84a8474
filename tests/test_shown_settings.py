"""Settings that are shown hold no secret, whatever is added to them."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.config import EngineConfig
from octavo.shown_settings import HIDDEN, IS_PUBLIC, show_settings

SECRET = "hunter2"
MARKED = {
    "chat_template",
    "generation_config",
    "journal",
    "model",
    "revision",
    "tokenizer",
    "tokenizer_revision",
}


@dataclass
class Example:
    count: int = 3
    share: float | None = 0.5
    is_on: bool = True
    mode: Literal["a", "b"] = "a"
    sizes: list[int] | None = None
    pair: tuple[int, ...] = (1, 2)
    unset: str | None = None
    empty: tuple[str, ...] = ()
    named: str = field(default="shown", metadata={IS_PUBLIC: True})
    names: tuple[str, ...] = field(default=("x", "y"), metadata={IS_PUBLIC: True})
    chosen: str = field(default="cpu", metadata={"choices": ("cpu", "cuda")})


@dataclass
class Secrets:
    text: str = SECRET
    maybe: str | None = SECRET
    several: list[str] = field(default_factory=lambda: [SECRET])
    tuples: tuple[str, ...] = (SECRET,)
    mixed: int | str = SECRET
    anything: Any = SECRET
    mapping: dict[str, str] = field(default_factory=lambda: {SECRET: SECRET})
    numbers: dict[int, int] = field(default_factory=lambda: {1: 2})
    path: Path = Path(SECRET)
    data: bytes = SECRET.encode()
    nested: Example = field(default_factory=Example)
    unmarked: str = field(default=SECRET, metadata={IS_PUBLIC: False, "choices": ()})


def test_numbers_switches_choices_and_marked_texts_are_shown():
    assert show_settings(Example()) == {
        "count": 3,
        "share": 0.5,
        "is_on": True,
        "mode": "a",
        "sizes": None,
        "pair": [1, 2],
        "unset": None,
        "empty": [],
        "named": "shown",
        "names": ["x", "y"],
        "chosen": "cpu",
    }


def test_everything_else_is_hidden_without_being_known_as_a_secret():
    assert show_settings(Secrets()) == {item.name: HIDDEN for item in fields(Secrets)}


@pytest.mark.parametrize("settings_type", [EngineConfig])
def test_texts_of_settings_are_shown_only_by_decision(settings_type):
    texts = {item.name for item in fields(settings_type) if "str" in str(item.type)}
    values = dict.fromkeys(texts - {"device", "attention_backend"}, SECRET)
    shown = show_settings(settings_type(**values))
    assert {name for name in values if shown[name] == SECRET} == MARKED
    assert shown["hf_token"] == HIDDEN
