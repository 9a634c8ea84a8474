"""Every setting of ``octavo serve`` besides the engine's, with its default and meaning.

The command line, its help and ``docs/configuration.md`` are made from this file; it loads nothing
heavy. What a setting does is decided where it is used.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.conversation import RESERVED_NAMES
from octavo.errors import ConfigError
from octavo.shown_settings import IS_PUBLIC

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
ANY = ("*",)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOWEST = {
    "stream_interval": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "max_connections": 1,
    "max_header_bytes": 1_024,
    "max_header_count": 1,
}
ORIGIN = r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s,]*"
TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"


def setting(
    default: Any,
    help_text: str,
    *,
    group: str,
    choices: tuple[Any, ...] = (),
    is_public: bool = False,
) -> Any:
    """Declare a field.

    ``group`` is the section of the help in which it stands; a text is shown to others only if it
    ``is_public`` (see shown_settings).
    """
    metadata = {"help": help_text, "group": group, "choices": choices, IS_PUBLIC: is_public}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Settings of one server.

    A tuple is given as several values or as a JSON list; a list by repeating its option.

    Raises:
        ConfigError: a value is outside its range, or two settings contradict each other; the
            message never shows a key.
    """

    host: str | None = setting(
        None,
        f"Address to listen on; 0.0.0.0 is every network of this machine. None is {DEFAULT_HOST}.",
        group="Network",
        is_public=True,
    )
    port: int | None = setting(
        None, f"Port to listen on; 0 takes a free one. None is {DEFAULT_PORT}.", group="Network"
    )
    uds: str | None = setting(
        None, "Unix socket to listen on, in the place of host and port.", group="Network"
    )
    root_path: str = setting(
        "",
        "Path under which a proxy shows this server, such as /llm.",
        group="Network",
        is_public=True,
    )
    ssl_certfile: str | None = setting(
        None, "File with the certificate chain; with one, the server speaks TLS.", group="Network"
    )
    ssl_keyfile: str | None = setting(
        None,
        "File with the certificate's private key; None: it is in ssl_certfile.",
        group="Network",
    )
    ssl_ca_certs: str | None = setting(
        None, "File with the authorities that certificates of clients come from.", group="Network"
    )
    ssl_cert_reqs: int = setting(
        0,
        "Certificates of clients: 0 asks for none, 1 checks those that are sent, 2 requires one.",
        group="Network",
        choices=(0, 1, 2),
    )
    ssl_ciphers: str | None = setting(
        None, "Ciphers of TLS 1.2, in OpenSSL's notation.", group="Network"
    )

    api_key: list[str] = field(
        default_factory=list,
        repr=False,
        metadata={
            "help": "Key that every request but health checks must send; may be repeated. Others "
            "on this machine can read command lines: a file or OCTAVO_API_KEY is safer.",
            "group": "Access",
            "choices": (),
        },
    )
    api_key_file: str | None = setting(None, "File with such keys, one a line.", group="Access")
    allowed_origins: tuple[str, ...] = setting(
        ANY,
        "Web sites whose pages may use this server (CORS); [] is none.",
        group="Access",
        is_public=True,
    )
    allowed_methods: tuple[str, ...] = setting(
        ANY, "HTTP methods that such pages may use.", group="Access", is_public=True
    )
    allowed_headers: tuple[str, ...] = setting(
        ANY, "HTTP headers that such pages may send.", group="Access", is_public=True
    )
    allow_credentials: bool = setting(
        False, "Let such pages send cookies; needs allowed_origins.", group="Access"
    )
    enable_admin_endpoints: bool = setting(
        False, "Serve the routes that pause, resume, abort; needs an API key.", group="Access"
    )
    disable_fastapi_docs: bool = setting(
        False, "Serve no /docs, /redoc and /openapi.json.", group="Access"
    )

    served_model_name: tuple[str, ...] = setting(
        (),
        "Names of the model in the API, the first also in metrics; none is MODEL.",
        group="API",
        is_public=True,
    )
    trust_request_chat_template: bool = setting(
        False,
        "Render conversations with the chat_template of a request; without it, such are refused.",
        group="API",
    )
    chat_template_content_format: str = setting(
        "auto",
        "What templates get as content: strings, lists of parts (openai), or what they take.",
        group="API",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009 - a field
        None,
        "Variables of the chat template that a request may replace, as a JSON object like "
        '{"enable_thinking": false}.',
        group="API",
    )
    response_role: str = setting(
        "assistant", "Who speaks in the answers of a chat.", group="API", is_public=True
    )
    return_tokens_as_token_ids: bool = setting(
        False,
        "Let log-probabilities call tokens token_id:ID unless a request says otherwise.",
        group="API",
    )
    stream_interval: int = setting(
        1,
        "Tokens that a stream collects for one chunk unless a request says otherwise.",
        group="API",
    )
    enable_force_include_usage: bool = setting(
        False, "End every stream with its usage, as include_usage does.", group="API"
    )
    enable_request_id_headers: bool = setting(
        False, "Send x-request-id with every response.", group="API"
    )

    max_queued_requests: int | None = setting(
        None, "Answer 429 instead of letting more requests wait; None is no limit.", group="Limits"
    )
    max_queued_tokens: int | None = setting(
        None,
        "Answer 429 instead of letting more prompt tokens wait; None is no limit.",
        group="Limits",
    )
    request_timeout: float | None = setting(
        None,
        "Seconds after which requests end that set no timeout of their own; None is no limit.",
        group="Limits",
    )
    stall_timeout: float = setting(
        60.0,
        "Seconds without the end of a step, with requests open, after which the server is not "
        "ready.",
        group="Limits",
    )
    shutdown_timeout: float = setting(
        0.0,
        "Seconds that open requests may go on after SIGTERM before they are aborted.",
        group="Limits",
    )
    max_connections: int | None = setting(
        None,
        "Open connections beyond which only health checks are answered; None: as many as the "
        "limit of open files leaves.",
        group="Limits",
    )
    max_header_bytes: int = setting(
        65_536, "Longest head of a request, its line and headers together.", group="Limits"
    )
    max_header_count: int = setting(256, "Most headers of a request.", group="Limits")

    log_level: str = setting("info", "Least level that is logged.", group="Log", choices=LOG_LEVELS)
    uvicorn_log_level: str = setting(
        "info",
        "The same for the HTTP server: its lines for requests are info, its own steps debug.",
        group="Log",
        choices=LOG_LEVELS,
    )
    access_log: bool = setting(True, "Log a line for each HTTP request.", group="Log")
    disable_access_log_for_endpoints: str | None = setting(
        None, "Paths without such lines, with commas between them.", group="Log", is_public=True
    )
    enable_log_requests: bool = setting(
        False, "Log when a request begins and ends, with its id, its tokens and times.", group="Log"
    )
    disable_log_stats: bool = setting(
        False, "Log no line about load and speed every 10 seconds of work.", group="Log"
    )

    def __post_init__(self) -> None:
        self._check_address()
        self._check_tls()
        self._check_web_pages()
        self._check_numbers()
        self._check_api()

    def _check_address(self) -> None:
        if self.uds is not None and not (self.host is None and self.port is None):
            raise ConfigError("uds stands in the place of host and port: leave those out")
        if self.host == "":
            raise ConfigError("host is empty; every network of this machine is 0.0.0.0")
        if self.port is not None and not 0 <= self.port <= 65_535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.root_path):
            raise ConfigError(
                f"root_path is {self.root_path!r}; it must be like /llm, without a / at the end"
            )

    def _check_tls(self) -> None:
        needs = {
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_ca_certs": self.ssl_ca_certs,
            "ssl_cert_reqs": self.ssl_cert_reqs or None,
            "ssl_ciphers": self.ssl_ciphers,
        }
        for name, value in needs.items():
            if value is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} is {value!r}, but there is no ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs}, but without ssl_ca_certs no certificate"
                " of a client can be checked"
            )

    def _check_web_pages(self) -> None:
        for origin in self.allowed_origins:
            if not re.fullmatch(ORIGIN, origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; an origin is like https://chat.example:8443,"
                    " without a path, or * for all"
                )
        for name in ("allowed_methods", "allowed_headers"):
            for value in getattr(self, name):
                if not re.fullmatch(TOKEN, value):
                    raise ConfigError(f"{name} has {value!r}, which cannot be in a request")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials would let every web page act for its reader while"
                " allowed_origins is *: list the sites that may"
            )

    def _check_api(self) -> None:
        if not all(map(str.strip, self.served_model_name)):
            raise ConfigError("served_model_name has an empty name")
        if not self.response_role:
            raise ConfigError("response_role is empty")
        for name in self.default_chat_template_kwargs or ():
            if name in RESERVED_NAMES:
                raise ConfigError(
                    f"default_chat_template_kwargs sets {name}, which is no variable of a template"
                )

    def _check_numbers(self) -> None:
        for name, low in LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}; it must be at least {low}")
        for name in ("request_timeout", "stall_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} is {seconds}; it must be seconds greater than 0")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout}; it must be a number of seconds"
            )
