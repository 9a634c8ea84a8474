"""Typed look-ups in a configuration file that somebody else wrote. No torch."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

MAX_COUNT = 2**31 - 1
"""No network has more of anything; what is larger does not even fit into tensors' sizes."""
MAX_LAYERS = 10_000
"""Ten times more than any network has: each is built before its weights are looked for."""


class Fields:
    """The fields of one file; every error names the file, the field and the value.

    A field that is null counts as absent, as transformers has it.
    """

    def __init__(self, values: Mapping[str, Any], *, origin: str) -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.origin = origin

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read a JSON object.

        Raises:
            ConfigError: the file cannot be read or holds something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, not a {type(values).__name__}")
        return cls(values, origin=str(path))

    def nested(self, name: str) -> "Fields":
        """Return the object under ``name``; an absent one is empty."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, "it must be an object")
        return Fields(value, origin=f"{name} in {self.origin}")

    def count(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = MAX_COUNT
    ) -> int:
        """Return an integer from ``low`` to ``high``."""
        value = self._require(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.refuse(name, f"it must be an integer of at least {low}")
        if value > high:
            raise self.refuse(name, f"it must be at most {high}")
        return value

    def number(self, name: str, *, default: float | None = None, above: float = -math.inf) -> float:
        """Return a finite integer or float above a bound as a float."""
        value = self._require(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(name, "it must be a number")
        if not above < value < math.inf or value > sys.float_info.max:
            bound = "" if above == -math.inf else f" above {above:g}"
            raise self.refuse(name, f"it must be a finite number{bound}")
        return float(value)

    def optional_count(self, name: str, *, low: int = 1) -> int | None:
        """Return an integer of at least ``low``, None when absent."""
        return self.count(name, low=low) if name in self.values else None

    def optional_number(self, name: str) -> float | None:
        """Return a number as a float, None when absent."""
        return self.number(name) if name in self.values else None

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self._require(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "it must be true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return a string."""
        value = self._require(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "it must be a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one or several token ids; none when absent."""
        value = self.values.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise self.refuse(name, "it must be a token id or a list of them")
        return tuple(ids)

    def refuse(self, name: str, advice: str) -> ConfigError:
        """Return the error for a field that is present and cannot be used."""
        return ConfigError(f"{self.origin} has {name} {self.values[name]!r}; {advice}")

    def _require(self, name: str, default: object) -> object:
        value = self.values.get(name, default)
        if value is None:
            raise ConfigError(f"{self.origin} lacks the field {name}")
        return value
