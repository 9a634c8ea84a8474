"""What of a settings object may be shown to others.

A rule of permission, so that a new secret cannot be forgotten: numbers, switches and choices are
shown, texts only where their field is marked. Everything else is hidden.
"""

from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SettingValue = None | bool | int | float | str | list[int | str]

HIDDEN = "(hidden)"
"""Stands in the place of a value that is set and not shown."""
IS_PUBLIC = "is_public"
"""Key of a field's metadata; true where texts may be shown."""


def show_settings(settings: Any) -> dict[str, SettingValue]:
    """Return the fields of a dataclass by name, with their values or ``HIDDEN``."""
    hints = get_type_hints(type(settings))
    return {
        field.name: _show(getattr(settings, field.name), field, hints[field.name])
        for field in fields(settings)
    }


def _show(value: Any, field: "Field[Any]", hint: Any) -> SettingValue:
    is_listed = bool(field.metadata.get("choices") or field.metadata.get(IS_PUBLIC))
    if value and not is_listed and not _is_harmless(hint):
        return HIDDEN
    return list(value) if isinstance(value, tuple) else value


def _is_harmless(hint: Any) -> bool:
    """Say whether no value of this type can hold a secret."""
    if get_origin(hint) in (Union, UnionType, list, tuple):
        return all(_is_harmless(member) for member in get_args(hint) if member is not ...)
    return get_origin(hint) is Literal or hint in (bool, int, float, NoneType)
