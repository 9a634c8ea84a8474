"""Scripted lives of requests, and what a scrape shows of them."""

import re

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.block_manager.manager import MissReason
from octavo.engine.door import REFUSALS
from octavo.engine.growth import RetractionCause
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreOutputs,
    CoreStats,
    ExpireRequests,
    FinishedRequest,
    FinishRequest,
    StartedRequest,
    StepTimes,
    pack_ids,
)
from octavo.engine.metrics import EngineMetrics
from octavo.engine.waits import WaitKind
from octavo.executor.step import RowSampling
from tests.echo_core import ECHO_INFO

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "octavo_paused",
    "octavo_stall_seconds",
    'num_requests_waiting_by_reason{reason="capacity"}',
    'num_requests_waiting_by_reason{reason="deferred"}',
    *(f'octavo_num_requests_waiting_by_reason{{reason="{kind}"}}' for kind in WaitKind),
}
COUNTERS = {
    "corrupted_requests_total",
    "generation_tokens_total",
    *(f'octavo_retractions_total{{cause="{cause}"}}' for cause in RetractionCause),
    *(f'octavo_prefix_cache_miss_tokens_total{{reason="{reason}"}}' for reason in MissReason),
    "num_preemptions_total",
    'octavo_request_timeouts_total{state="running"}',
    'octavo_request_timeouts_total{state="waiting"}',
    'octavo_requests_refused_total{reason_code="queue_full_requests"}',
    'octavo_requests_refused_total{reason_code="queue_full_tokens"}',
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_total",
    'prompt_tokens_by_source_total{source="local_cache_hit"}',
    'prompt_tokens_by_source_total{source="local_compute"}',
    'request_success_total{finished_reason="abort"}',
    'request_success_total{finished_reason="error"}',
    'request_success_total{finished_reason="length"}',
    'request_success_total{finished_reason="stop"}',
}
HISTOGRAMS = {
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
}


STEP_PARTS = ("plan", "launch", "wait", "update")


def make_request(number, *, num_prompt_tokens=10, max_tokens=8, arrival_s=100.0):
    return AddRequest(
        number=number,
        request_id="r",
        prompt=pack_ids(list(range(num_prompt_tokens))),
        sampling=RowSampling(seed=0),
        max_tokens=max_tokens,
        arrival_s=arrival_s,
    )


def make_outputs(numbers=(), *, now_s, started=(), finished=(), times=None, **stats):
    return CoreOutputs(
        numbers=list(numbers),
        token_ids=pack_ids([7] * len(numbers)),
        started=list(started),
        finished=list(finished),
        now_s=now_s,
        times=times or StepTimes(),
        stats=CoreStats(num_blocks=ECHO_INFO.num_blocks, **stats),
    )


def scrape(metrics):
    """Return every sample without the bounds of buckets: name and own labels -> value."""
    text = generate_latest(metrics.registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            labels = "{" + ",".join(f'{k}="{v}"' for k, v in own.items()) + "}" if own else ""
            samples[sample.name.removeprefix("vllm:") + labels] = sample.value
    return samples


@pytest.fixture
def metrics():
    return EngineMetrics("tiny", ECHO_INFO)


def test_every_series_takes_two_values(metrics):
    before = scrape(metrics)
    metrics.add([make_request(1), make_request(2)])
    metrics.add([make_request(3)])
    metrics.update(
        make_outputs(
            [1, 2],
            now_s=102.0,
            started=[StartedRequest(1, 101.0, 0), StartedRequest(2, 101.0, 4)],
            num_running=2,
            num_waiting=6,
            num_waiting_by_reason=dict.fromkeys(WaitKind, 1),
            num_blocks_used=512,
            num_tokens_scheduled=16,
            num_retractions=dict.fromkeys(RetractionCause, 1),
            num_failed_rows=1,
            prefix_queries=20,
            prefix_hits=4,
            prefix_misses=dict.fromkeys(MissReason, 3),
            is_paused=True,
            times=StepTimes(0.001, 0.002, 0.003, 0.004),
        )
    )
    metrics.queue.measure_stall = lambda: 61.0
    during = scrape(metrics)
    metrics.queue.measure_stall = lambda: 0.0
    for reason_code in REFUSALS:
        metrics.queue.note_refusal(reason_code)
    metrics.note_ends([ExpireRequests((2, 3), "time is up")])
    ended = [
        FinishedRequest(1, "stop", num_retractions=1),
        FinishedRequest(2, "length"),
        FinishedRequest(3, "abort"),
    ]
    metrics.update(make_outputs([1, 2], now_s=103.0, finished=ended))
    metrics.add([make_request(4)])
    metrics.fail_all(104.0)
    after = scrape(metrics)

    assert {name for name in GAUGES if before[name] == during[name]} == set()
    assert {name for name in GAUGES if after[name] != 0} == set()
    histograms = [f"{name}_{what}" for name in HISTOGRAMS for what in ("count", "sum")]
    for part in STEP_PARTS:
        histograms += [
            f'octavo_step_part_seconds_{what}{{part="{part}"}}' for what in ("count", "sum")
        ]
    counts = COUNTERS.union(histograms)
    changed = {name for name in counts if len({s[name] for s in (before, during, after)}) > 1}
    assert changed == counts


def test_prompts_without_output_are_counted_once_when_they_end(metrics):
    metrics.add([make_request(number, max_tokens=0) for number in (1, 2)])
    started = [StartedRequest(1, 101.0, 4), StartedRequest(2, 101.0, 0)]
    finished = [FinishedRequest(1, "length"), FinishedRequest(2, "abort")]
    metrics.update(make_outputs(now_s=102.0, started=started, finished=finished))
    samples = scrape(metrics)
    assert samples["prompt_tokens_total"] == 10
    assert samples["prompt_tokens_cached_total"] == 4
    assert samples["generation_tokens_total"] == samples["time_to_first_token_seconds_count"] == 0


def test_nothing_that_counts_falls_when_the_core_dies(metrics):
    metrics.add([make_request(1)])
    stats = {
        "num_retractions": {"own_growth": 3},
        "num_failed_rows": 1,
        "prefix_queries": 20,
        "prefix_hits": 4,
        "prefix_misses": {"cold": 16},
        "num_running": 1,
    }
    metrics.update(make_outputs([1], now_s=101.0, started=[StartedRequest(1, 100.5, 4)], **stats))
    before = scrape(metrics)
    metrics.fail_all(102.0)
    after = scrape(metrics)
    counting = set(before) - GAUGES
    assert before["prefix_cache_hits_total"] == 4
    assert {name for name in counting if after[name] < before[name]} == set()
    assert {after[name] for name in GAUGES} == {0}


@pytest.mark.parametrize(
    "end", [FinishRequest(1, "stop", 2), AbortRequests((1, 9)), ExpireRequests((1, 9), "")]
)
def test_tokens_behind_an_answers_end_are_not_its_own(metrics, end):
    metrics.add([make_request(1)])
    metrics.update(make_outputs([1], now_s=101.0))
    metrics.update(make_outputs([1], now_s=102.0))
    metrics.note_ends([end])
    metrics.update(make_outputs([1], now_s=105.0, finished=[FinishedRequest(1, "stop")]))
    samples = scrape(metrics)
    assert samples["request_generation_tokens_sum"] == 2
    assert samples["request_max_num_generation_tokens_sum"] == 2
    assert samples["inter_token_latency_seconds_sum"] == 1.0
    assert samples["generation_tokens_total"] == 3


def test_scrape_has_no_series_that_is_not_listed(metrics):
    metrics.add([make_request(1)])
    names = {name.split("{")[0] for name in scrape(metrics)}
    families = {*HISTOGRAMS, "octavo_step_part_seconds"}
    histograms = {f"{n}_{part}" for n in families for part in ("bucket", "count", "sum")}
    listed = {name.split("{")[0] for name in GAUGES | COUNTERS} | histograms
    assert names == listed | {"cache_config_info"}


def test_intervals_are_between_the_events_they_name(metrics):
    metrics.add([make_request(1, arrival_s=100.0)])
    started = [StartedRequest(1, 101.0, 0)]
    metrics.update(make_outputs([1], now_s=103.0, started=started))
    metrics.update(make_outputs([1], now_s=107.0))
    metrics.update(make_outputs([1], now_s=107.5))
    metrics.update(make_outputs(now_s=110.0, finished=[FinishedRequest(1, "abort")]))
    sums = {name.removesuffix("_sum"): value for name, value in scrape(metrics).items()}
    assert sums["request_queue_time_seconds"] == 1.0
    assert sums["request_prefill_time_seconds"] == 2.0
    assert sums["time_to_first_token_seconds"] == 3.0
    assert sums["request_decode_time_seconds"] == 4.5
    assert sums["inter_token_latency_seconds"] == 4.5
    assert sums["request_time_per_output_token_seconds"] == 2.25
    assert sums["request_inference_time_seconds"] == 6.5
    assert sums["e2e_request_latency_seconds"] == 10.0


def test_buckets_are_cumulative_and_bounds_belong_to_them(metrics):
    for number, num_prompt_tokens in enumerate((1, 2, 3, 5000)):
        metrics.add([make_request(number, num_prompt_tokens=num_prompt_tokens)])
    metrics.fail_all(101.0)
    samples = scrape(metrics)
    counts = {
        bound: samples[f'request_prompt_tokens_bucket{{le="{bound}"}}']
        for bound in ("1.0", "2.0", "5.0", "2000.0", "+Inf")
    }
    assert counts == {"1.0": 1, "2.0": 2, "5.0": 3, "2000.0": 3, "+Inf": 4}


def test_rows_of_one_step_are_observed_together(metrics):
    metrics.add([make_request(number) for number in range(3)])
    metrics.update(make_outputs([0, 1, 2], now_s=101.0))
    metrics.update(make_outputs([0, 1, 2], now_s=101.5))
    samples = scrape(metrics)
    assert samples["inter_token_latency_seconds_count"] == 3
    assert samples["inter_token_latency_seconds_sum"] == 1.5
    assert samples["generation_tokens_total"] == 6


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("is_cached", [True, False])
def test_settings_of_the_pool_are_labels(block_size, is_cached):
    settings = {"dtype": "bfloat16", "enable_prefix_caching": is_cached}
    info = msgspec.structs.replace(ECHO_INFO, block_size=block_size, settings=settings)
    (name,) = (n for n in scrape(EngineMetrics("tiny", info)) if n.startswith("cache_config_info"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
    assert labels == {
        "block_size": str(block_size),
        "num_gpu_blocks": "1024",
        "cache_dtype": "bfloat16",
        "enable_prefix_caching": str(is_cached),
        "gpu_memory_utilization": "None",
        "kv_cache_memory_bytes": "None",
        "num_gpu_blocks_override": "None",
    }


def test_a_part_that_a_step_did_not_have_is_not_observed(metrics):
    metrics.update(make_outputs(now_s=1.0, times=StepTimes(plan=0.5)))
    metrics.update(make_outputs(now_s=2.0, times=StepTimes(plan=0.25, launch=0.0)))
    samples = scrape(metrics)
    counts = [samples[f'octavo_step_part_seconds_count{{part="{part}"}}'] for part in STEP_PARTS]
    assert counts == [2, 1, 0, 0]
    assert samples['octavo_step_part_seconds_sum{part="plan"}'] == 0.75


def test_waiting_answers_are_counted_by_what_they_wait_for(metrics):
    waiting = {"deferred": 2, "result": 1, "blocks": 5, "turn": 3}
    metrics.update(make_outputs(now_s=1.0, num_waiting=11, num_waiting_by_reason=waiting))
    samples = scrape(metrics)
    for kind in WaitKind:
        sample = samples[f'octavo_num_requests_waiting_by_reason{{reason="{kind}"}}']
        assert sample == waiting.get(kind, 0)
    assert samples['num_requests_waiting_by_reason{reason="capacity"}'] == 8
    assert samples['num_requests_waiting_by_reason{reason="deferred"}'] == 3


def test_timeouts_are_counted_once_by_what_the_answer_did(metrics):
    metrics.add([make_request(number) for number in range(3)])
    metrics.update(make_outputs(now_s=1.0, started=[StartedRequest(0, 0.5, 0)]))
    metrics.note_ends([ExpireRequests((0, 1, 7), "")])
    metrics.update(make_outputs(now_s=2.0, finished=[FinishedRequest(0, "error")]))
    samples = scrape(metrics)
    assert samples['octavo_request_timeouts_total{state="running"}'] == 1
    assert samples['octavo_request_timeouts_total{state="waiting"}'] == 1


def test_two_engines_share_nothing(metrics):
    other = EngineMetrics("tiny", ECHO_INFO)
    metrics.add([make_request(1)])
    metrics.fail_all(101.0)
    assert scrape(metrics)['request_success_total{finished_reason="error"}'] == 1
    assert scrape(other)['request_success_total{finished_reason="error"}'] == 0
