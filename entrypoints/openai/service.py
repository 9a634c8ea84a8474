"""What the routes of one server share."""

import time
from dataclasses import dataclass, field

from octavo.engine.async_engine import AsyncEngine
from octavo.entrypoints.http.errors import HttpError
from octavo.entrypoints.openai.template_pool import TemplatePool
from octavo.entrypoints.served_model import ServedModel
from octavo.entrypoints.server_settings import ServerSettings


@dataclass(slots=True, kw_only=True)
class Service:
    """One engine and the names under which it is served."""

    engine: AsyncEngine
    model: ServedModel
    model_names: tuple[str, ...]
    """Requests may use any; the first stands for them all in the metrics."""
    has_admin_endpoints: bool = False
    keep_alive_s: float = 15.0
    """After this long without anything to send, a stream says that it lives."""
    settings: ServerSettings = field(default_factory=ServerSettings)
    templates: TemplatePool = field(default_factory=TemplatePool)
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    """True when the server ends: what is open goes on, nothing new is admitted."""

    def choose_model(self, name: str | None) -> str:
        """Return the model that a request names, or the first if it names none.

        Raises:
            HttpError: there is no such model, or the server is ending.
        """
        self.check_admission()
        if name is None:
            return self.model_names[0]
        self.check_model(name)
        return name

    def check_admission(self) -> None:
        """Do nothing while requests are taken.

        Raises:
            HttpError: the server is ending.
        """
        if self.is_draining:
            raise HttpError(503, "the server is shutting down", reason_code="shutting_down")

    def check_model(self, name: str) -> None:
        """Do nothing if this is a name of the model.

        Raises:
            HttpError: there is no such model.
        """
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise HttpError(
                404,
                f"model {name!r} does not exist; served here: {served}",
                parameter="model",
                reason_code="model_not_found",
            )
