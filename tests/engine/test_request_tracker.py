import numpy as np
import pytest

from octavo.engine.messages import (
    AbortRequests,
    CoreOutputs,
    ExpireRequests,
    FinishedRequest,
    FinishRequest,
    LogprobEntry,
    StartedRequest,
    pack_ids,
)
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.outputs import Logprob
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.checkpoints import EOS_ID, build_tokenizer
from tests.engine.scripted_core import INFO

TOKENIZER = Tokenizer(build_tokenizer())
LETTER = {letter: TOKENIZER.hf_tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijz"}
KINDS = list(RequestOutputKind)


def create_tracker(tokenizer=TOKENIZER):
    return RequestTracker(tokenizer, INFO)


def add(tracker, request_id="r", *, prompt="z", arrival_s=1.0, **params):
    return tracker.add(prompt, SamplingParams(**params), request_id=request_id, arrival_s=arrival_s)


def tokens(numbers_to_letters, *, finished=(), now_s=5.0, **columns):
    """Return what a step reports that gave each number one letter's token, or an id."""
    ids = [LETTER.get(token, token) for token in numbers_to_letters.values()]
    return CoreOutputs(
        numbers=list(numbers_to_letters),
        token_ids=pack_ids(ids),
        finished=list(finished),
        now_s=now_s,
        **columns,
    )


def run(tracker, letters, number=0, reason="length"):
    """Feed letters to one request; return all of its outputs."""
    outputs = []
    for position, letter in enumerate(letters, start=1):
        is_last = position == len(letters)
        finished = [FinishedRequest(number, reason)] if is_last else []
        outputs += tracker.update(tokens({number: letter}, finished=finished))[0]
    return outputs


def make_logprobs(token_id, other_id, rank):
    values = np.array([-2.0, -0.5], dtype="<f4").tobytes()
    return LogprobEntry(pack_ids([token_id, other_id]), values, rank)


def test_cumulative_outputs_repeat_everything():
    tracker = create_tracker()
    add(tracker)
    outputs = run(tracker, "abc")
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "abc"]
    assert outputs[-1].outputs[0].token_ids == [LETTER["a"], LETTER["b"], LETTER["c"]]
    assert [output.finished for output in outputs] == [False, False, True]


def test_delta_outputs_join_to_the_whole():
    tracker = create_tracker()
    add(tracker, output_kind=RequestOutputKind.DELTA)
    outputs = run(tracker, "abc")
    assert [output.outputs[0].text for output in outputs] == ["a", "b", "c"]
    assert [output.outputs[0].token_ids for output in outputs] == [
        [LETTER[letter]] for letter in "abc"
    ]


def test_final_only_output_comes_once():
    tracker = create_tracker()
    add(tracker, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = run(tracker, "abc")
    assert (output.finished, output.outputs[0].text) == (True, "abc")
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_text_with_stop_strings(kind):
    tracker = create_tracker()
    add(tracker, stop=["dx", "ef"], output_kind=kind)
    outputs, messages = [], []
    for letter in "abcdefgh":
        result = tracker.update(tokens({0: letter}))
        outputs += result[0]
        messages += result[1]
    texts = [output.outputs[0].text for output in outputs]
    assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == "abcd"
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == "ef"
    assert messages == [FinishRequest(0, "ef", 6)]
    assert tracker.num_open_requests == 0


def test_tokens_after_a_stop_string_are_ignored():
    tracker = create_tracker()
    add(tracker, stop="b")
    tracker.update(tokens({0: "a"}))
    (final,), _ = tracker.update(tokens({0: "b"}))
    assert final.finished
    assert tracker.update(tokens({0: "c"}, finished=[FinishedRequest(0, "stop")])) == ([], [])


def test_stop_string_wins_over_the_length_limit_and_needs_no_message():
    tracker = create_tracker()
    add(tracker, stop="b")
    tracker.update(tokens({0: "a"}))
    (final,), messages = tracker.update(tokens({0: "b"}, finished=[FinishedRequest(0, "length")]))
    assert (final.outputs[0].finish_reason, final.outputs[0].text) == ("stop", "a")
    assert messages == []


def test_stop_string_is_not_matched_against_the_prompt():
    tracker = create_tracker()
    add(tracker, prompt="ab", stop="bc")
    assert run(tracker, "cd")[-1].outputs[0].text == "cd"


def test_stop_token_is_kept_as_a_token_and_left_out_of_the_text():
    tracker = create_tracker()
    add(tracker, stop_token_ids=[LETTER["c"]])
    tracker.update(tokens({0: "a"}))
    report = FinishedRequest(0, "stop", LETTER["c"])
    (final,), _ = tracker.update(tokens({0: "c"}, finished=[report]))
    answer = final.outputs[0]
    assert (answer.text, answer.token_ids) == ("a", [LETTER["a"], LETTER["c"]])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", LETTER["c"])


def test_end_token_has_no_stop_reason():
    tracker = create_tracker()
    add(tracker, skip_special_tokens=False)
    (final,), _ = tracker.update(tokens({0: EOS_ID}, finished=[FinishedRequest(0, "stop")]))
    assert (final.outputs[0].text, final.outputs[0].stop_reason) == ("", None)


def test_stop_token_is_text_when_stops_are_to_be_included():
    tracker = create_tracker()
    add(tracker, stop_token_ids=[LETTER["c"]], include_stop_str_in_output=True)
    report = FinishedRequest(0, "stop", LETTER["c"])
    (final,), _ = tracker.update(tokens({0: "c"}, finished=[report]))
    assert final.outputs[0].text == "c"


def test_held_back_text_is_released_at_the_end():
    tracker = create_tracker()
    add(tracker, stop="bcx", output_kind=RequestOutputKind.DELTA)
    assert [output.outputs[0].text for output in run(tracker, "abc")] == ["a", "", "bc"]


def test_text_is_empty_without_detokenizing():
    for tracker, params in ((create_tracker(), {"detokenize": False}), (create_tracker(None), {})):
        add(tracker, prompt=[1, 259], **params)
        final = run(tracker, "ab")[-1]
        assert (final.outputs[0].text, len(final.outputs[0].token_ids)) == ("", 2)


def test_logprobs_name_the_token_first_and_add_up():
    tracker = create_tracker()
    add(tracker, logprobs=1)
    entry = make_logprobs(LETTER["a"], LETTER["b"], rank=3)
    (output,), _ = tracker.update(tokens({0: "a"}, logprobs={0: entry}))
    answer = output.outputs[0]
    assert answer.logprobs == [
        {LETTER["a"]: Logprob(-2.0, 3, "a"), LETTER["b"]: Logprob(-0.5, 1, "b")}
    ]
    assert list(answer.logprobs[0]) == [LETTER["a"], LETTER["b"]]
    assert answer.cumulative_logprob == -2.0


def test_logprobs_of_the_most_likely_token_are_one_entry():
    tracker = create_tracker()
    add(tracker, logprobs=1, output_kind=RequestOutputKind.DELTA)
    for letter in "ab":
        entry = make_logprobs(LETTER[letter], LETTER[letter], rank=1)
        (output,), _ = tracker.update(tokens({0: letter}, logprobs={0: entry}))
        assert output.outputs[0].logprobs == [{LETTER[letter]: Logprob(-2.0, 1, letter)}]
    assert output.outputs[0].cumulative_logprob == -4.0


def test_logprobs_are_none_when_nobody_asked():
    tracker = create_tracker()
    add(tracker)
    answer = run(tracker, "a")[0].outputs[0]
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)


def test_prompt_logprobs_have_nothing_for_the_first_token():
    tracker = create_tracker()
    add(tracker, prompt=[1, 300, 301], prompt_logprobs=0)
    entries = {0: [make_logprobs(300, 300, 1), make_logprobs(301, 301, 1)]}
    (output,), _ = tracker.update(tokens({0: "a"}, prompt_logprobs=entries))
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[300], [301]]


def test_prompt_logprobs_of_one_token_are_a_list_all_the_same():
    tracker = create_tracker()
    add(tracker, prompt=[1], prompt_logprobs=0)
    assert run(tracker, "a")[0].prompt_logprobs == [None]


def test_a_stream_begins_with_the_prompt_logprobs_whichever_answer_is_first():
    tracker = create_tracker()
    kind = RequestOutputKind.DELTA
    add(tracker, prompt=[1, 300], n=2, prompt_logprobs=0, output_kind=kind)
    assert tracker.update(tokens({1: "a"})) == ([], [])
    entries = {0: [make_logprobs(300, 7, rank=2)]}
    (output,), _ = tracker.update(tokens({0: "b", 1: "c"}, prompt_logprobs=entries))
    assert len(output.prompt_logprobs) == 2
    assert [answer.text for answer in output.outputs] == ["b", "ac"]


def test_an_answer_that_fails_is_reported_without_prompt_logprobs():
    tracker = create_tracker()
    kind = RequestOutputKind.DELTA
    add(tracker, prompt=[1, 300], n=2, prompt_logprobs=0, output_kind=kind)
    failed = FinishedRequest(0, "error", error="non-finite logits")
    (output,), _ = tracker.update(tokens({}, finished=[failed]))
    assert output.prompt_logprobs is None
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_ends_with_one_output(kind):
    tracker = create_tracker()
    add(tracker, prompt=[1, 300], prompt_logprobs=0, max_tokens=0, output_kind=kind)
    entries = {0: [make_logprobs(300, 7, rank=2)]}
    finished = [FinishedRequest(0, "length")]
    (output,), _ = tracker.update(tokens({}, finished=finished, prompt_logprobs=entries))
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")
    assert output.finished
    assert len(output.prompt_logprobs) == 2


def test_prompt_logprobs_may_be_read_before_they_are_shown():
    tracker = create_tracker()
    add(tracker, prompt=[1, 300], prompt_logprobs=0)
    entries = {0: [make_logprobs(300, 7, rank=2)]}
    (request,), _ = tracker.apply(tokens({0: "a"}, prompt_logprobs=entries))
    assert request.num_unread_logprobs == 2
    request.read_prompt_logprobs()
    assert request.num_unread_logprobs == 0
    assert list(request.take_output().prompt_logprobs[1]) == [300, 7]


def test_a_stream_collects_tokens_after_the_first():
    tracker = create_tracker()
    kind = RequestOutputKind.DELTA
    add(tracker, max_tokens=8, stream_interval=3, output_kind=kind)
    outputs = run(tracker, "abcdefgh")
    texts = [output.outputs[0].text for output in outputs]
    assert texts == ["a", "bcd", "efg", "h"]


def test_bad_words_need_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="needs a tokenizer") as caught:
        add(create_tracker(tokenizer=None), prompt=[5], bad_words=["a"])
    assert caught.value.parameter == "bad_words"


def test_delta_outputs_carry_prompt_logprobs_once():
    tracker = create_tracker()
    add(tracker, prompt=[1, 300], prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    entries = {0: [make_logprobs(300, 300, 1)]}
    (first,), _ = tracker.update(tokens({0: "a"}, prompt_logprobs=entries))
    (second,), _ = tracker.update(tokens({0: "b"}))
    assert (len(first.prompt_logprobs), second.prompt_logprobs) == (2, None)


def test_answers_of_one_request_finish_one_by_one():
    tracker = create_tracker()
    messages = add(tracker, n=3)
    assert [message.number for message in messages] == [0, 1, 2]
    (output,), _ = tracker.update(
        tokens({0: "a", 1: "b", 2: "c"}, finished=[FinishedRequest(1, "length")])
    )
    assert [answer.text for answer in output.outputs] == ["a", "b", "c"]
    assert [answer.finished for answer in output.outputs] == [False, True, False]
    assert not output.finished
    ends = [FinishedRequest(0, "length"), FinishedRequest(2, "length")]
    (output,), _ = tracker.update(tokens({0: "d", 2: "e"}, finished=ends))
    assert [answer.text for answer in output.outputs] == ["ad", "b", "ce"]
    assert output.finished


def test_delta_outputs_carry_only_answers_with_news():
    tracker = create_tracker()
    add(tracker, n=2, output_kind=RequestOutputKind.DELTA)
    (output,), _ = tracker.update(tokens({1: "b"}))
    assert [(answer.index, answer.text) for answer in output.outputs] == [(1, "b")]


def test_final_only_output_waits_for_every_answer():
    tracker = create_tracker()
    add(tracker, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert tracker.update(tokens({0: "a"}, finished=[FinishedRequest(0, "length")])) == ([], [])
    (output,), _ = tracker.update(tokens({1: "b"}, finished=[FinishedRequest(1, "length")]))
    assert [answer.text for answer in output.outputs] == ["a", "b"]


def test_abort_ends_every_answer_and_forgets_the_request():
    tracker = create_tracker()
    add(tracker, n=2)
    tracker.update(tokens({0: "a", 1: "b"}, finished=[FinishedRequest(0, "length")]))
    (output,), message = tracker.abort(["r", "unknown"], now_s=9.0)
    assert message == AbortRequests((1,))
    assert [answer.finish_reason for answer in output.outputs] == ["length", "abort"]
    assert (output.finished, output.metrics.finished_time) == (True, 9.0)
    assert tracker.update(tokens({1: "c"})) == ([], [])
    assert tracker.abort(["r"], now_s=9.0) == ([], AbortRequests(()))


def test_an_id_that_is_aborted_twice_in_one_call_ends_once():
    tracker = create_tracker()
    add(tracker)
    outputs, message = tracker.abort(["r", "r"], now_s=9.0)
    assert (len(outputs), message) == (1, AbortRequests((0,)))


def test_expiry_ends_what_has_not_ended_with_a_reason_and_how_far_it_was():
    tracker = create_tracker()
    add(tracker, n=2)
    started = [StartedRequest(0, 2.0, 0), StartedRequest(1, 2.0, 0)]
    ended = [FinishedRequest(0, "length")]
    tracker.update(tokens({0: "a", 1: "b"}, started=started, finished=ended))
    (output,), message = tracker.expire("r", timeout_s=2.5, now_s=9.0)
    error = "the request timed out after 2.5 s: it was running, with 2 tokens generated"
    assert message == ExpireRequests((1,), error)
    ends = [(answer.finish_reason, answer.error, answer.reason_code) for answer in output.outputs]
    assert ends == [("length", None, None), ("error", error, "request_timeout")]
    assert (output.finished, output.metrics.finished_time) == (True, 9.0)


def test_expiry_of_a_waiting_request_says_so():
    tracker = create_tracker()
    add(tracker, prompt=[1, 2, 3])
    _, message = tracker.expire("r", timeout_s=1, now_s=9.0)
    assert message.error.endswith(
        "after 1 s: it was waiting for its first step, with 3 prompt tokens"
    )


def test_expiry_and_end_at_one_moment_are_one_end():
    tracker = create_tracker()
    add(tracker, "before")
    add(tracker, "after")
    last = [FinishedRequest(0, "length")]
    assert len(tracker.update(tokens({0: "a"}, finished=last))[0]) == 1
    assert tracker.expire("before", timeout_s=1, now_s=9.0) == ([], ExpireRequests((), ""))
    assert len(tracker.expire("after", timeout_s=1, now_s=9.0)[0]) == 1
    assert tracker.update(tokens({1: "a"}, finished=[FinishedRequest(1, "length")])) == ([], [])


def test_death_of_the_core_ends_every_request_with_its_message():
    tracker = create_tracker()
    add(tracker, "a")
    add(tracker, "b", output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = tracker.fail_all("the core died", now_s=9.0)
    assert [output.request_id for output in outputs] == ["a", "b"]
    answers = [output.outputs[0] for output in outputs]
    assert {(answer.finish_reason, answer.error) for answer in answers} == {
        ("error", "the core died")
    }
    assert tracker.num_open_requests == 0


def test_error_of_one_request_reaches_its_output():
    tracker = create_tracker()
    add(tracker)
    report = FinishedRequest(0, "error", error="non-finite logits")
    (output,), _ = tracker.update(CoreOutputs(finished=[report]))
    assert output.outputs[0].error == "non-finite logits"


def test_times_and_cache_hits_are_those_that_the_core_reports():
    tracker = create_tracker()
    add(tracker, n=2, arrival_s=1.0)
    started = [StartedRequest(0, 2.0, 32), StartedRequest(1, 3.0, 48)]
    tracker.update(CoreOutputs(started=started))
    tracker.update(tokens({0: "a", 1: "a"}, now_s=4.0))
    ends = [FinishedRequest(0, "length", num_retractions=1), FinishedRequest(1, "length")]
    (output,), _ = tracker.update(tokens({0: "a", 1: "a"}, now_s=6.0, finished=ends))
    metrics = output.metrics
    assert output.num_cached_tokens == 32
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (1.0, 3.0)
    assert (metrics.last_token_time, metrics.finished_time) == (6.0, 6.0)
    assert metrics.num_retractions == 1


def test_request_id_is_free_again_after_the_final_output():
    tracker = create_tracker()
    add(tracker)
    with pytest.raises(InvalidRequestError, match="'r', which an open request has"):
        add(tracker)
    run(tracker, "a")
    assert [message.number for message in add(tracker)] == [1]


def test_output_hands_the_prompt_back():
    tracker = create_tracker()
    add(tracker, prompt="the")
    add(tracker, "ids", prompt={"prompt_token_ids": [1, 300], "prompt": "shown"})
    outputs, _ = tracker.update(tokens({0: "a", 1: "a"}))
    assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [
        ("the", TOKENIZER.encode("the")),
        ("shown", [1, 300]),
    ]
