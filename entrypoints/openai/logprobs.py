"""Log-probabilities in the two forms of OpenAI's API."""

from collections.abc import Callable, Iterator
from typing import Any

from octavo.outputs import CompletionOutput, Logprob, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM sends the same number for it."""


def chat_logprobs(
    answer: CompletionOutput, num_alternatives: int, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """Return the form of /v1/chat/completions: one entry for each token.

    ``token_bytes`` gives the bytes of a token, which may be a part of a character.
    """

    def describe(token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": entry.decoded_token,
            "logprob": _finite(entry.logprob),
            "bytes": list(token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **describe(token_id, entries[token_id]),
                "top_logprobs": [describe(*item) for item in _top(entries, num_alternatives)],
            }
            for token_id, entries in _positions(answer)
        ]
    }


class CompletionLogprobs:
    """The form of /v1/completions: columns, with the offset of each token in the answer's text.

    Keeps the offset between the chunks of a stream.
    """

    def __init__(self, num_alternatives: int) -> None:
        self._num_alternatives = num_alternatives
        self._offset = 0

    def take(self, answer: CompletionOutput) -> dict[str, Any]:
        """Return the columns of the answer's tokens."""
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, entries in _positions(answer):
            own = entries[token_id]
            alternatives = [entry for _, entry in _top(entries, self._num_alternatives)]
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(_finite(own.logprob))
            columns["tokens"].append(own.decoded_token)
            columns["top_logprobs"].append(
                {entry.decoded_token: _finite(entry.logprob) for entry in [*alternatives, own]}
            )
            self._offset += len(own.decoded_token or "")
        return columns


def _positions(answer: CompletionOutput) -> Iterator[tuple[int, TokenLogprobs]]:
    assert answer.logprobs is not None, "the request asked for logprobs"
    return zip(answer.token_ids, answer.logprobs, strict=True)


def _top(entries: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the most likely tokens in order."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
    return ranked[:count]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
