"""API process: every open request of one front end, from its prompt to its final output.

No I/O and no clock, so that the offline class and the server share it: messages to the core are
returned to the caller, and times are arguments.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from octavo.engine.detokenizer import Detokenizer, StopStrings
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreOutputs,
    ExpireRequests,
    FinishedRequest,
    FinishRequest,
    unpack_ids,
)
from octavo.engine.open_request import Answer, Finish, InFlight, OpenRequest, read_logprobs
from octavo.engine.prompt import PLAIN, EncodedPrompt, EncodeOptions, Prompt, encode_prompt
from octavo.engine.request_factory import RequestDefaults, RequestFactory, Submission
from octavo.engine.row_sampling import encode_bad_words
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.executor.step import EXHAUSTED
from octavo.outputs import ENGINE_DEAD, NO_TOKEN_LEFT, REQUEST_TIMEOUT, RequestOutput
from octavo.sampling_params import SamplingParams


class RequestTracker:
    """Owns the text and the outputs of every open request.

    A request is open from ``add`` until an output with ``finished`` has been returned for it, by
    whichever method; each request gets exactly one such output. What the core still says about an
    answer that has ended is ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: CoreInfo,
        defaults: RequestDefaults | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = info.max_tokens_per_request
        self._factory = RequestFactory(tokenizer, info, defaults or RequestDefaults())
        self.on_begin: Callable[[Submission], None] = lambda submission: None
        self.on_end: Callable[[OpenRequest], None] = lambda request: None
        """Called when a client's request has been opened, and when a prompt of it has ended."""
        self._requests: dict[str, OpenRequest] = {}
        self._answers: dict[int, tuple[OpenRequest, Answer]] = {}

    @property
    def num_open_requests(self) -> int:
        """How many client requests have not ended."""
        return len(self._requests)

    def list_open(self, limit: int, now_s: float) -> list[InFlight]:
        """Describe the open requests, the oldest first, at most ``limit`` of them."""
        return [request.describe(now_s) for request in islice(self._requests.values(), limit)]

    def encode(self, prompt: Prompt, options: EncodeOptions = PLAIN) -> EncodedPrompt:
        """Read a prompt into token ids: the slow part of ``add``, which any thread may do first.

        Raises:
            InvalidRequestError: the prompt is empty, of an unknown form, or a text that is too long
                to be tried.
        """
        return encode_prompt(prompt, self._tokenizer, options, limit=self._limit)

    def encode_bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return the token sequences that ``params`` forbid: the other slow part of ``add``.

        Raises:
            InvalidRequestError: there is no tokenizer to read the words.
        """
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words needs a tokenizer, and the engine runs without one: use logit_bias",
                parameter="bad_words",
            )
        return encode_bad_words(params.bad_words, self._tokenizer)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        arrival_s: float,
        priority: int = 0,
    ) -> list[AddRequest]:
        """Open a request; return the messages to send to the core, one for each of ``n`` answers.

        ``request_id`` must differ from those of all open requests: a front end that takes ids from
        its clients makes them unique itself.

        Raises:
            InvalidRequestError: the request cannot be served as written; nothing has been opened.
        """
        if request_id in self._requests:
            raise InvalidRequestError(
                f"request_id is {request_id!r}, which an open request has; use another one",
                parameter="request_id",
            )
        submission = Submission(
            request_id=request_id,
            keys=[request_id],
            prompts=[self.encode(prompt)],
            params=params,
            arrival_s=arrival_s,
            priority=priority,
            bad_words_ids=self.encode_bad_words(params),
        )
        return self.submit(submission)[0]

    def submit(self, submission: Submission) -> list[list[AddRequest]]:
        """Do as ``add`` does for several prompts: all are opened, by their keys, or none.

        Returns the messages of each prompt.
        """
        messages = self._factory.create(submission)
        for place, answers in enumerate(messages):
            self._open(submission, place, [message.number for message in answers])
        self.on_begin(submission)
        return messages

    def update(self, outputs: CoreOutputs) -> tuple[list[RequestOutput], list[FinishRequest]]:
        """Take what one step produced; return what the clients are owed and messages to the core.

        The messages end the requests in whose text a stop string was found; send them at once.
        """
        requests, messages = self.apply(outputs)
        return [request.take_output() for request in requests], messages

    def apply(self, outputs: CoreOutputs) -> tuple[list[OpenRequest], list[FinishRequest]]:
        """Do as ``update`` does, but leave it to the caller when to take the outputs.

        Whatever has come until a request's ``take_output`` is one output.
        """
        self._note_started(outputs)
        self._take_prompt_logprobs(outputs)
        touched: dict[str, OpenRequest] = {}
        messages = self._take_tokens(outputs, touched)
        for report in outputs.finished:
            self._take_finish(report, touched)
        return self._find_news(touched.values(), outputs.now_s), messages

    def abort(
        self, request_ids: Iterable[str], now_s: float
    ) -> tuple[list[RequestOutput], AbortRequests]:
        """End open requests with ``abort``; return their final outputs and the message to the core.

        Ids that belong to no open request are ignored.
        """
        numbers = self._unfinished_numbers(request_ids)
        return self._end(numbers, Finish("abort"), now_s), AbortRequests(numbers)

    def expire(
        self, request_id: str, timeout_s: float, now_s: float
    ) -> tuple[list[RequestOutput], ExpireRequests]:
        """End an open request whose time is up with ``error``; returns what ``abort`` returns."""
        numbers = self._unfinished_numbers([request_id])
        if not numbers:
            return [], ExpireRequests((), "")
        progress = self._requests[request_id].progress
        error = f"the request timed out after {timeout_s:g} s: it was {progress}"
        finish = Finish("error", error=error, reason_code=REQUEST_TIMEOUT)
        return self._end(numbers, finish, now_s), ExpireRequests(numbers, error)

    def fail_all(self, message: str, now_s: float) -> list[RequestOutput]:
        """End every open request with ``error``, because the core will say nothing more."""
        finish = Finish("error", error=message, reason_code=ENGINE_DEAD)
        return self._end(tuple(self._answers), finish, now_s)

    def _unfinished_numbers(self, request_ids: Iterable[str]) -> tuple[int, ...]:
        names = [name for name in dict.fromkeys(request_ids) if name in self._requests]
        return tuple(
            answer.number for name in names for answer in self._requests[name].unfinished_answers
        )

    def _open(self, submission: Submission, place: int, numbers: Sequence[int]) -> None:
        params, prompt = submission.params, submission.prompts[place]
        answers = [
            Answer(number, index, params, self._create_detokenizer(params, prompt))
            for index, number in enumerate(numbers)
        ]
        request = OpenRequest(submission, place, answers, self._tokenizer)
        self._requests[request.request_id] = request
        self._answers.update({answer.number: (request, answer) for answer in answers})

    def _create_detokenizer(
        self, params: SamplingParams, prompt: EncodedPrompt
    ) -> Detokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        decoder = self._tokenizer.create_decoder(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        decoder.prime(prompt.token_ids.tolist())
        if not params.stop_strings:
            return Detokenizer(decoder)
        stops = StopStrings(
            params.stop_strings,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return Detokenizer(decoder, stops)

    def _note_started(self, outputs: CoreOutputs) -> None:
        for started in outputs.started:
            if (found := self._answers.get(started.number)) is not None:
                request, answer = found
                request.note_started(answer, started)

    def _take_prompt_logprobs(self, outputs: CoreOutputs) -> None:
        for number, entries in outputs.prompt_logprobs.items():
            if (found := self._answers.get(number)) is not None:
                found[0].store_prompt_logprobs(entries)

    def _take_tokens(
        self, outputs: CoreOutputs, touched: dict[str, OpenRequest]
    ) -> list[FinishRequest]:
        stopped = {report.number for report in outputs.finished if report.reason == "stop"}
        ended = {report.number for report in outputs.finished}
        logprobs, now_s = outputs.logprobs, outputs.now_s
        messages = []
        token_ids = unpack_ids(outputs.token_ids).tolist()
        for number, token_id in zip(outputs.numbers, token_ids, strict=True):
            found = self._answers.get(number)
            if found is None:
                continue
            request, answer = found
            metrics = request.metrics
            metrics.last_token_time = now_s
            if metrics.first_token_time is None:
                metrics.first_token_time = now_s
            stop_string = answer.append(token_id, is_stop_token=number in stopped)
            if logprobs and (entry := logprobs.get(number)) is not None:
                answer.append_logprobs(read_logprobs(entry, self._tokenizer))
            if stop_string is not None:
                self._finish(request, answer, Finish("stop", stop_reason=stop_string))
                if number not in ended:
                    messages.append(FinishRequest(number, stop_string, answer.num_tokens))
            if request.is_streamed or stop_string is not None:
                touched[request.request_id] = request
        return messages

    def _take_finish(self, report: FinishedRequest, touched: dict[str, OpenRequest]) -> None:
        found = self._answers.get(report.number)
        if found is None:
            return
        request, answer = found
        request.metrics.num_retractions += report.num_retractions
        finish = Finish(
            report.reason,
            stop_reason=report.stop_reason,
            error=report.error,
            reason_code=NO_TOKEN_LEFT if report.error == EXHAUSTED else None,
        )
        self._finish(request, answer, finish)
        touched[request.request_id] = request

    def _finish(self, request: OpenRequest, answer: Answer, finish: Finish) -> None:
        request.finish(answer, finish)
        del self._answers[answer.number]
        if request.finished:
            del self._requests[request.request_id]
            self.on_end(request)

    def _end(self, numbers: Sequence[int], finish: Finish, now_s: float) -> list[RequestOutput]:
        touched = {}
        for number in numbers:
            request, answer = self._answers[number]
            self._finish(request, answer, finish)
            touched[request.request_id] = request
        return [request.take_output() for request in self._find_news(touched.values(), now_s)]

    def _find_news(self, requests: Iterable[OpenRequest], now_s: float) -> list[OpenRequest]:
        """Return the requests whose clients are owed an output; note the time of those that end."""
        owed = []
        for request in requests:
            if request.finished:
                request.metrics.finished_time = now_s
            if request.has_news:
                owed.append(request)
        return owed
