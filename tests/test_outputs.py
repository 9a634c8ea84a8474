"""Outputs: what is derived from their fields."""

import pytest

from octavo import CompletionOutput, RequestMetrics


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_completion_is_finished_once_it_has_a_reason(reason):
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], finish_reason=reason).finished


def test_times_are_unknown_until_their_event_has_happened():
    metrics = RequestMetrics(arrival_time=10.0)
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (None, None)
    metrics.first_scheduled_time = 10.5
    metrics.first_token_time = 12.0
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (0.5, 2.0)
