"""What becomes of fields of a JSON body that its endpoint does not read.

A field of OpenAI's or vLLM's API that is not supported is refused, unless its value changes
nothing. Any other field is accepted, and named in a header and in the log.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from octavo.errors import InvalidRequestError

logger = logging.getLogger(__name__)

Refused = Mapping[str, tuple[Any, ...]]
"""Field -> the values, besides null, that change nothing and are therefore accepted."""

IGNORED_FIELDS_HEADER = "x-octavo-ignored-fields"
MAX_HEADER_CHARACTERS = 1_000
MAX_JSON_DEPTH = 201
"""Levels of lists and objects in a body that pydantic's parser takes."""


class JsonBody(BaseModel):
    """A body whose declared fields are read; null is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)
    refused: ClassVar[Refused] = {}

    def check_fields(self) -> list[str]:
        """Return the names of unknown fields, which are ignored.

        Raises:
            InvalidRequestError: a field that is not supported has a value that would matter.
        """
        unknown = self.model_extra or {}
        for name, value in unknown.items():
            if name in self.refused and value is not None and value not in self.refused[name]:
                raise InvalidRequestError(
                    f"{name} is not supported by this server: leave it out",
                    parameter=name,
                    reason_code="unsupported_parameter",
                )
        return [name for name in unknown if name not in self.refused]


def report_ignored_fields(names: Sequence[str]) -> dict[str, str]:
    """Log the names of ignored fields; return the header that tells the client."""
    if not names:
        return {}
    # The names come from the client: quoted, they cannot end a header or a line of the log.
    quoted = ",".join(quote(name) for name in names)[:MAX_HEADER_CHARACTERS]
    logger.warning("a request has fields that are ignored: %s", quoted)
    return {IGNORED_FIELDS_HEADER: quoted}
