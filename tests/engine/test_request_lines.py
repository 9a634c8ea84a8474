import logging

import pytest

from octavo.engine.messages import CoreOutputs, FinishedRequest, StartedRequest, pack_ids
from octavo.engine.request_lines import log_requests
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.checkpoints import build_tokenizer
from tests.engine.scripted_core import INFO

DELTA = RequestOutputKind.DELTA


@pytest.fixture
def tracker(caplog):
    caplog.set_level(logging.INFO, "octavo.engine.request_lines")
    tracker = RequestTracker(Tokenizer(build_tokenizer()), INFO)
    log_requests(tracker, clock=lambda: 3.5)
    return tracker


def add(tracker, **params):
    return tracker.add("z", SamplingParams(**params), request_id="cmpl-a", arrival_s=1.0)


def test_lines_tell_how_a_request_began_and_ended(tracker, caplog):
    first, second = add(tracker, n=2, max_tokens=4, stop="secret", seed=7, output_kind=DELTA)
    started = [StartedRequest(first.number, num_cached_tokens=1, scheduled_s=1.25)]
    ends = [FinishedRequest(first.number, "stop"), FinishedRequest(second.number, "length")]
    tracker.update(
        CoreOutputs(
            numbers=[first.number, second.number],
            token_ids=pack_ids([5, 5]),
            started=started,
            finished=ends,
            now_s=2.0,
        )
    )
    num_tokens = len(first.prompt) // 4
    assert caplog.messages == [
        f"request cmpl-a begins: {num_tokens} prompt tokens, n 2, seed 7, max_tokens 4",
        "request cmpl-a ends (stop, length) after 2.500 s: 2 tokens, "
        f"1 of {num_tokens} prompt tokens cached, first step after 0.250 s, "
        "first token after 1.000 s",
    ]


def test_request_that_ends_before_its_first_step_says_so(tracker, caplog):
    add(tracker)
    tracker.abort(["cmpl-a"], now_s=2.0)
    assert "(abort) after 2.500 s: 0 tokens" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("no first step, no first token")


@pytest.mark.parametrize("end", ["expire", "fail_all"])
def test_every_kind_of_end_has_its_line(tracker, caplog, end):
    add(tracker)
    if end == "expire":
        tracker.expire("cmpl-a", 1.0, now_s=2.0)
    else:
        tracker.fail_all("the core died", now_s=2.0)
    assert caplog.messages[-1].startswith("request cmpl-a ends (error)")
    assert len(caplog.messages) == 2


def test_nobody_is_told_unless_asked(caplog):
    caplog.set_level(logging.DEBUG)
    tracker = RequestTracker(Tokenizer(build_tokenizer()), INFO)
    add(tracker)
    tracker.abort(["cmpl-a"], now_s=2.0)
    assert caplog.messages == []
