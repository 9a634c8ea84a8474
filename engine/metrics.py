"""API process: counts what one engine does, under vLLM's metric names.

Reads the messages between front end and core; owns no fact about a request. Names, labels and
buckets are a contract with dashboards: docs/metrics.md lists them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.engine.histogram import Histogram, one_two_five
from octavo.engine.load_log import Load
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreStats,
    ExpireRequests,
    FinishedRequest,
    FinishRequest,
    StartedRequest,
)
from octavo.engine.metric_families import Families
from octavo.engine.queue_metrics import QueueMetrics
from octavo.engine.step_metrics import StepMetrics
from octavo.engine.waits import WaitKind
from octavo.outputs import FinishReason

# fmt: off
TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)
TOKEN_TIME_BUCKETS = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_TIME_BUCKETS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on
NUM_ANSWERS_BUCKETS = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
STEP_TOKENS_BUCKETS = (1, *(2**power for power in range(3, 15)))
CACHE_SETTINGS = (
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
)


class EngineMetrics(Collector):
    """The numbers of one engine, made into Prometheus series when they are read.

    ``registry`` belongs to this engine alone, so that several engines can live in one process.
    """

    def __init__(self, model_name: str, info: CoreInfo) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._families = Families({"model_name": model_name, "engine": "0"})
        self.queue = QueueMetrics(self._families)
        self._steps = StepMetrics(self._families)
        self._info = info
        self._stats = CoreStats(num_blocks=info.num_blocks)
        self._open: dict[int, OpenAnswer] = {}
        self._prompt_tokens: Counter[str] = Counter(local_compute=0, local_cache_hit=0)
        self._num_generated = 0
        self._finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._histograms = _create_histograms(info.max_model_len)

    def add(self, messages: Sequence[AddRequest]) -> None:
        """Note a client's request: one message for each answer."""
        group = AnswerGroup(len(messages))
        for message in messages:
            self._open[message.number] = OpenAnswer(
                num_prompt_tokens=len(message.prompt) // 4,
                max_tokens=message.max_tokens,
                arrival_s=message.arrival_s,
                group=group,
            )

    def update(self, outputs: CoreOutputs) -> None:
        """Note what one step produced."""
        self._stats = outputs.stats
        self._steps.observe(outputs.times)
        if outputs.stats.num_tokens_scheduled:
            self._observe("iteration_tokens_total", outputs.stats.num_tokens_scheduled)
        for started in outputs.started:
            self._start(started)
        self._add_tokens(outputs.numbers, outputs.now_s)
        for report in outputs.finished:
            self._finish(report, outputs.now_s)

    def note_ends(self, messages: Sequence[CoreMessage]) -> None:
        """Note which answers the front end told the core to end: later tokens are nobody's.

        An answer's tokens are then those that its client sees; ``generation_tokens`` counts all.
        """
        for message in messages:
            if isinstance(message, FinishRequest):
                self._cut((message.number,))
            elif isinstance(message, AbortRequests | ExpireRequests):
                self._cut(message.numbers)
            if isinstance(message, ExpireRequests):
                self._note_timeouts(message.numbers)

    def fail_all(self, now_s: float) -> None:
        """Note that the core died: every open answer ends with ``error`` and nothing runs."""
        for number in list(self._open):
            self._finish(FinishedRequest(number, "error"), now_s)
        self._stats = msgspec.structs.replace(
            self._stats,
            num_running=0,
            num_waiting=0,
            num_waiting_by_reason={},
            num_blocks_used=0,
            is_paused=False,
        )

    def read_load(self) -> Load:
        """Return what the log tells every few seconds."""
        stats = self._stats
        return Load(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.num_blocks_used / self._info.num_blocks,
            num_prompt_tokens=self._prompt_tokens.total(),
            num_generated_tokens=self._num_generated,
            num_prefix_queries=stats.prefix_queries,
            num_prefix_hits=stats.prefix_hits,
        )

    def collect(self) -> Iterator[Metric]:
        """Make the series of now."""
        for name, help_text, value in self._gauges():
            yield self._families.gauge(f"vllm:{name}", help_text, [({}, value)])
        yield self._waiting_by_reason()
        yield self._cache_config()
        for name, help_text, value in self._counters():
            yield self._families.counter(f"vllm:{name}", help_text, [({}, value)])
        yield self._prompt_tokens_by_source()
        yield self._request_success()
        for name, histogram in self._histograms.items():
            yield self._families.histogram(f"vllm:{name}", histogram.help_text, [({}, histogram)])
        yield from self.queue.collect(self._stats)
        yield from self._steps.collect(self._stats)

    def _start(self, started: StartedRequest) -> None:
        answer = self._open.get(started.number)
        if answer is not None:
            answer.scheduled_s = started.scheduled_s
            answer.num_cached_tokens = started.num_cached_tokens

    def _cut(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._open:
                self._open[number].is_cut = True

    def _note_timeouts(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._open:
                self.queue.note_timeout(is_started=self._open[number].scheduled_s is not None)

    def _add_tokens(self, numbers: Sequence[int], now_s: float) -> None:
        self._num_generated += len(numbers)
        intervals: Counter[float] = Counter()  # rows that decode together share one interval
        for number in numbers:
            answer = self._open.get(number)
            if answer is None or answer.is_cut:
                continue
            if answer.last_token_s is None:
                self._note_first_token(answer, now_s)
            else:
                intervals[now_s - answer.last_token_s] += 1
            answer.last_token_s = now_s
            answer.num_tokens += 1
        for interval, count in intervals.items():
            self._observe("inter_token_latency_seconds", interval, count)

    def _note_first_token(self, answer: "OpenAnswer", now_s: float) -> None:
        answer.first_token_s = now_s
        self._observe("time_to_first_token_seconds", now_s - answer.arrival_s)
        self._count_prompt(answer)

    def _count_prompt(self, answer: "OpenAnswer") -> None:
        self._prompt_tokens["local_cache_hit"] += answer.num_cached_tokens
        self._prompt_tokens["local_compute"] += answer.num_computed_prompt_tokens

    def _finish(self, report: FinishedRequest, now_s: float) -> None:
        answer = self._open.pop(report.number, None)
        if answer is None:
            return
        self._finished[report.reason] += 1
        if answer.max_tokens == 0 and report.reason == "length":
            self._count_prompt(answer)  # it was computed, and no token comes to tell
        self._observe("e2e_request_latency_seconds", now_s - answer.arrival_s)
        self._observe("request_prompt_tokens", answer.num_prompt_tokens)
        self._observe("request_generation_tokens", answer.num_tokens)
        self._observe("request_params_max_tokens", answer.max_tokens)
        self._observe("request_prefill_kv_computed_tokens", answer.num_computed_prompt_tokens)
        self._observe("request_num_preemptions", report.num_retractions)
        for name, interval in answer.intervals():
            self._observe(name, interval)
        if answer.group.end_one(answer.num_tokens):
            self._observe("request_max_num_generation_tokens", answer.group.most_tokens)
            self._observe("request_params_n", answer.group.num_answers)

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        self._histograms[name].observe(value, count)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        stats = self._stats
        usage = stats.num_blocks_used / self._info.num_blocks
        yield "num_requests_running", "Requests that hold KV blocks.", stats.num_running
        yield "num_requests_waiting", "Requests that wait for admission.", stats.num_waiting
        yield "kv_cache_usage_perc", "KV blocks in use; 1 is the whole pool.", usage

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        stats, prompt = self._stats, self._prompt_tokens
        queries, hits = stats.prefix_queries, stats.prefix_hits
        num_retractions = sum(stats.num_retractions.values())
        yield "prefix_cache_queries", "Prompt tokens looked up in the cache.", queries
        yield "prefix_cache_hits", "Prompt tokens found in the cache.", hits
        yield "num_preemptions", "Times a request lost its KV blocks.", num_retractions
        yield "prompt_tokens", "Prompt tokens that were computed to their end.", prompt.total()
        yield "prompt_tokens_cached", "Those from the cache.", prompt["local_cache_hit"]
        yield "generation_tokens", "Tokens generated.", self._num_generated
        yield "corrupted_requests", "Requests with non-finite logits.", stats.num_failed_rows

    def _waiting_by_reason(self) -> Metric:
        kinds = self._stats.num_waiting_by_reason
        num_deferred = sum(kinds.get(kind, 0) for kind in (WaitKind.DEFERRED, WaitKind.RESULT))
        samples = [
            ({"reason": "capacity"}, sum(kinds.values()) - num_deferred),
            ({"reason": "deferred"}, num_deferred),
        ]
        help_text = "Waiting answers by whether they wait for room."
        return self._families.gauge("vllm:num_requests_waiting_by_reason", help_text, samples)

    def _cache_config(self) -> Metric:
        settings = self._info.settings
        labels = {
            "block_size": str(self._info.block_size),
            "num_gpu_blocks": str(self._info.num_blocks),
            "cache_dtype": str(settings.get("dtype")),
            **{name: str(settings.get(name)) for name in CACHE_SETTINGS},
        }
        help_text = "Settings of the KV pool, as labels."
        return self._families.gauge("vllm:cache_config_info", help_text, [(labels, 1)])

    def _prompt_tokens_by_source(self) -> Metric:
        samples = [({"source": source}, num) for source, num in self._prompt_tokens.items()]
        help_text = "Prompt tokens by where their K/V came from."
        return self._families.counter("vllm:prompt_tokens_by_source", help_text, samples)

    def _request_success(self) -> Metric:
        samples = [({"finished_reason": reason}, num) for reason, num in self._finished.items()]
        return self._families.counter("vllm:request_success", "Ended answers.", samples)


@dataclass(slots=True)
class AnswerGroup:
    """The answers to one client request."""

    num_answers: int
    num_ended: int = 0
    most_tokens: int = 0

    def end_one(self, num_tokens: int) -> bool:
        """Note that an answer ended; return whether it was the last."""
        self.num_ended += 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        return self.num_ended == self.num_answers


@dataclass(slots=True)
class OpenAnswer:
    """What was seen of an answer that has not ended; times are None until they have come."""

    group: AnswerGroup
    num_prompt_tokens: int
    max_tokens: int
    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    is_cut: bool = False
    """The client has its end; what the core computed since then does not count."""

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens whose K/V was not in the cache."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def intervals(self) -> Iterator[tuple[str, float]]:
        """Return the parts of its life that have both ends."""
        if self.scheduled_s is None:
            return
        yield "request_queue_time_seconds", self.scheduled_s - self.arrival_s
        if self.first_token_s is None or self.last_token_s is None:
            return
        decode_s = self.last_token_s - self.first_token_s
        yield "request_prefill_time_seconds", self.first_token_s - self.scheduled_s
        yield "request_decode_time_seconds", decode_s
        yield "request_inference_time_seconds", self.last_token_s - self.scheduled_s
        if self.num_tokens > 1:
            yield "request_time_per_output_token_seconds", decode_s / (self.num_tokens - 1)


def _create_histograms(max_model_len: int) -> dict[str, Histogram]:
    times, lengths = REQUEST_TIME_BUCKETS, one_two_five(max_model_len)
    definitions: list[tuple[str, str, Sequence[float]]] = [
        ("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS),
        ("inter_token_latency_seconds", "Token to token.", TOKEN_TIME_BUCKETS),
        (
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first, by answer.",
            TOKEN_TIME_BUCKETS,
        ),
        ("e2e_request_latency_seconds", "Arrival to end.", times),
        ("request_queue_time_seconds", "Arrival to first step.", times),
        ("request_prefill_time_seconds", "First step to first token.", times),
        ("request_decode_time_seconds", "First to last token.", times),
        ("request_inference_time_seconds", "First step to last token.", times),
        ("request_prompt_tokens", "Prompt tokens of an answer.", lengths),
        ("request_generation_tokens", "Tokens of an answer.", lengths),
        ("request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths),
        ("request_params_max_tokens", "Most tokens that an answer might have had.", lengths),
        ("request_prefill_kv_computed_tokens", "Prompt tokens not from the cache.", lengths),
        ("request_params_n", "Answers of a request.", NUM_ANSWERS_BUCKETS),
        ("request_num_preemptions", "Times an answer lost its blocks.", NUM_PREEMPTIONS_BUCKETS),
        ("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS_BUCKETS),
    ]
    return {name: Histogram(help_text, bounds) for name, help_text, bounds in definitions}
