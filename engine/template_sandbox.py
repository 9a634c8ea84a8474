"""No process of its own: the language of templates, Jinja in a sandbox with a few additions.

A template comes from a model's author, or from a client. The sandbox keeps it from everything but
the data that it is given. It bounds neither time nor memory: ``template_process`` does.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from octavo.errors import ConfigError


class GenerationTag(Extension):
    """``{% generation %}`` marks what a model has written, for training; it is shown as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class SafeNamespace(Namespace):
    """Variables that a template may change; none that Python itself uses."""

    def __init__(*args: Any, **values: Any) -> None:  # a variable may be called self
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Keeps templates from the insides of objects; whoever looks there has no business here."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Fail at once; Jinja's own would print nothing."""
        kind = type(obj).__name__
        raise SecurityError(f"a template may not use the attribute {attribute!r} of a {kind}")


def create_sandbox() -> Sandbox:
    """Return the environment in which templates are compiled."""
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    del sandbox.globals["lipsum"]
    sandbox.globals |= {
        "dict": _create_dict,
        "namespace": SafeNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": _format_now,
    }
    sandbox.filters["tojson"] = _write_json
    return sandbox


def compile_template(text: str) -> tuple[Template, frozenset[str]]:
    """Return a template and the names of the variables that it reads.

    Raises:
        TemplateSyntaxError: it is no template.
    """
    sandbox = create_sandbox()
    names = find_undeclared_variables(sandbox.parse(text))
    return sandbox.from_string(text), frozenset(names)


def read_chat_template(file_or_text: str | None) -> str | None:
    """Return the text of a template that is given as a file's name or as itself.

    Raises:
        ConfigError: it looks like a file's name, and there is no such file; or it is no template.
    """
    if file_or_text is None:
        return None
    text = file_or_text
    if "{" not in text and "\n" not in text:
        text = _read_file(file_or_text)
    try:
        create_sandbox().parse(text)  # computes nothing
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template has an error in line {error.lineno}: {error}") from error
    return text


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have a variable called {name!r}")


def _create_dict(
    items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (), **more: Any
) -> dict[Any, Any]:
    return dict(items, **more)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {name!r}, which is no template and cannot be read as a file: {error}"
        ) from error
