"""API process and engine-core process: the typed messages between them, msgpack on the wire.

One message a step carries everything that the step produced; token ids travel as little-endian
int32 bytes.
"""

import msgspec
import numpy as np

from octavo.executor.step import Int32Array, RowSampling
from octavo.outputs import FinishReason
from octavo.shown_settings import SettingValue


def pack_ids(token_ids: "list[int] | Int32Array") -> bytes:
    """Encode token ids as little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """Decode what ``pack_ids`` wrote; the array is read-only."""
    return np.frombuffer(data, dtype="<i4")


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Put one request (one child of a client's request) into the queue."""

    number: int
    """Assigned by the sender, growing, never reused."""
    request_id: str
    """The client's id; children share it and ids may repeat."""
    prompt: bytes
    """``pack_ids`` of the prompt."""
    sampling: RowSampling
    max_tokens: int
    """Resolved: prompt and output together never exceed the engine's limit."""
    arrival_s: float
    priority: int = 0
    """Lower runs first under the ``priority`` policy."""
    eos_ids: tuple[int, ...] = ()
    """Ends with ``stop`` and no stop_reason; empty when ``ignore_eos``."""
    stop_ids: tuple[int, ...] = ()
    """Ends with ``stop`` and the id as stop_reason."""
    cache_salt: str | None = None
    private_namespace: int | None = None
    """Share blocks only with requests of the same value; set when prefix caching is disabled."""
    skip_reading_prefix_cache: bool = False


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests; unknown and finished numbers are ignored."""

    numbers: tuple[int, ...]


class ExpireRequests(msgspec.Struct, frozen=True, tag=True):
    """End these requests with ``error``: their time is up. Otherwise like ``AbortRequests``."""

    numbers: tuple[int, ...]
    error: str


class FinishRequest(msgspec.Struct, frozen=True, tag=True):
    """A stop string was found: the request ends with its first ``num_output_tokens`` tokens."""

    number: int
    stop_reason: str
    num_output_tokens: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every cached block that no request uses."""

    ticket: int | None = None
    """Asks for ``Done`` with the same ticket; None does not."""


class PauseScheduling(msgspec.Struct, frozen=True, tag=True):
    """Plan no step until ``ResumeScheduling``: requests keep their places, rows and blocks.

    Steps that are launched run out. Pausing a paused core changes nothing.
    """

    ticket: int | None = None


class ResumeScheduling(msgspec.Struct, frozen=True, tag=True):
    """End a pause; without one it changes nothing."""

    ticket: int | None = None


class ExplainRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask what is known of a client's request; the answer carries the same ``ticket``."""

    request_id: str
    ticket: int


CoreMessage = (
    AddRequest
    | AbortRequests
    | ExpireRequests
    | FinishRequest
    | ResetPrefixCache
    | PauseScheduling
    | ResumeScheduling
    | ExplainRequest
)


class CoreInfo(msgspec.Struct, frozen=True, tag=True):
    """Sent once when the core is ready."""

    max_tokens_per_request: int
    """The longest any request may become, prompt and output: min(max_model_len, pool)."""
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    plan_window: int | None = None
    """A plan looks at so many waiting requests, the first by arrival; None: it may look at any."""
    settings: dict[str, SettingValue] = {}
    """What the engine was started with, as it may be shown; open settings are resolved."""


class LogprobEntry(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position; the first id is the token that is there."""

    ids: bytes
    logprobs: bytes
    """float32, little-endian, one per id."""
    rank: int


class StartedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request was admitted for the first time."""

    number: int
    scheduled_s: float
    num_cached_tokens: int


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The last word about a request."""

    number: int
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    num_retractions: int = 0


class RequestExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request; times are of the machine's monotonic clock."""

    number: int
    request_id: str
    state: str
    """A name of ``RequestStatus`` in small letters."""
    place_in_queue: int | None
    """How many requests are before it, while it waits."""
    wait_reason: str | None
    """Why the last plan did not start it, with the numbers, or that the engine is paused."""
    finish_reason: FinishReason | None
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    """By launched steps, also again after retractions."""
    num_retractions: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    ended_s: float | None
    delivered_s: float | None = None
    """When the last output was taken; the core does not know it, the front end adds it."""


class Explanation(msgspec.Struct, frozen=True):
    """The answer to ``ExplainRequest``: one entry per child; none when the id is not known."""

    ticket: int
    requests: list[RequestExplanation]


class Done(msgspec.Struct, frozen=True):
    """What the message with this ticket asked for has been done."""

    ticket: int
    num_blocks_dropped: int = 0
    """Blocks that ``ResetPrefixCache`` has emptied."""


class CoreStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters since start and gauges of now, as of one step."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_by_reason: dict[str, int] = {}
    """By what they wait for: ``WaitKind``; kinds for which none waits are left out."""
    oldest_waiting: int | None = None
    """Number of the request that is first in the queue's own order."""
    oldest_waiting_reason: str | None = None
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_tokens_scheduled: int = 0
    """Of this step alone."""
    num_retractions: dict[str, int] = {}
    """By ``RetractionCause``."""
    num_failed_rows: int = 0
    """Requests that ended because their logits were not finite."""
    prefix_queries: int = 0
    """Prompt tokens looked up at admission."""
    prefix_hits: int = 0
    prefix_misses: dict[str, int] = {}
    """Those not found, by ``MissReason``."""
    is_paused: bool = False


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that one call of the core's ``step`` spent; None for parts that it did not have.

    With overlap, plan and launch are those of one step, wait and update of the one before.
    """

    plan: float | None = None
    launch: float | None = None
    wait: float | None = None
    update: float | None = None


class CoreOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced: ``numbers[i]`` got ``token_ids[i]``.

    A number occurs at most once in a message.
    """

    numbers: list[int] = []
    token_ids: bytes = b""
    logprobs: dict[int, LogprobEntry] = {}
    """Number -> logprobs of its token."""
    prompt_logprobs: dict[int, list[LogprobEntry]] = {}
    """Number -> the whole prompt from its second token on, sent once, by the first token."""
    started: list[StartedRequest] = []
    finished: list[FinishedRequest] = []
    """A request may finish with or without a token in the same message; the token comes first."""
    explanations: list[Explanation] = []
    done: list[Done] = []
    now_s: float = 0.0
    times: StepTimes = StepTimes()
    stats: CoreStats = CoreStats()


class CoreDied(msgspec.Struct, frozen=True, tag=True):
    """The core gives up; every request ends with ``error``."""

    message: str
    is_config_error: bool = False
    """True when it could not start because of a setting or the model: the caller's mistake."""


CoreReply = CoreInfo | CoreOutputs | CoreDied
