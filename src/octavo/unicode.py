"""Texts from outside: Python and command lines can hold half of a surrogate pair, no text."""

from octavo.errors import InvalidRequestError


def check_unicode(name: str, text: str) -> None:
    """Check that UTF-8 can write a text, as tokenizers, hashes and sockets need it.

    Raises:
        InvalidRequestError: it has half of a surrogate pair; ``name`` is the parameter's.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has {text[error.start]!r} at position {error.start}, which is half of a"
            " surrogate pair and no character",
            parameter=name,
        ) from error
