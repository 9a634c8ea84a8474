"""Log-probabilities in the forms of OpenAI's and vLLM's APIs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.engine.detokenizer import TextDecoder
from octavo.outputs import CompletionOutput, Logprob, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM sends the same number for it."""
COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

NameToken = Callable[[int, str | None], str]
"""Token id and decoded token -> what a response calls the token."""


def name_by_id(token_id: int, decoded_token: str | None) -> str:
    """Call a token by its id, which no other token has."""
    return f"token_id:{token_id}"


def name_by_text(token_id: int, decoded_token: str | None) -> str:
    """Call a token by its text; without a tokenizer there is none."""
    return name_by_id(token_id, None) if decoded_token is None else decoded_token


def chat_logprobs(
    answer: CompletionOutput,
    num_alternatives: int,
    token_bytes: Callable[[int], bytes],
    *,
    name_token: NameToken = name_by_text,
) -> dict[str, Any]:
    """Return the form of /v1/chat/completions: one entry for each token.

    ``token_bytes`` gives the bytes of a token, which may be a part of a character.
    """

    def describe(token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": name_token(token_id, entry.decoded_token),
            "logprob": _finite(entry.logprob),
            "bytes": list(token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **describe(token_id, entries[token_id]),
                "top_logprobs": [describe(*item) for item in _top(entries, num_alternatives)],
            }
            for token_id, entries in zip(answer.token_ids, _own(answer), strict=True)
        ]
    }


def prompt_logprobs(
    scores: Sequence[TokenLogprobs | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's form for prompts: an entry for each token, none for the first."""
    return [None if entries is None else _describe_entries(entries) for entries in scores]


class TextOffsets:
    """Where each token of a text begins in it; one inside a character begins where that does.

    A token that is not part of the text, such as an end token, begins where the text goes on.
    """

    def __init__(self, decoder: TextDecoder | None, start: int = 0) -> None:
        self.position = start
        self._decoder = decoder

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        if self._decoder is None:
            return [self.position for _ in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(self.position)
            self.position += len(self._decoder.decode((token_id,)))
        return offsets


class CompletionLogprobs:
    """The form of /v1/completions: columns, with one row for each token."""

    def __init__(self, num_alternatives: int, *, name_token: NameToken = name_by_text) -> None:
        self._num_alternatives = num_alternatives
        self._name_token = name_token

    def describe_answer(self, answer: CompletionOutput, offsets: TextOffsets) -> dict[str, Any]:
        """Return the columns of an answer's tokens."""
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        columns["text_offset"] = offsets.take(answer.token_ids)
        for token_id, entries in zip(answer.token_ids, _own(answer), strict=True):
            self._append(columns, token_id, entries)
        return columns

    def describe_prompt(
        self,
        token_ids: Sequence[int],
        scores: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
        token_text: Callable[[int], str | None],
    ) -> dict[str, Any]:
        """Return the columns of a prompt, whose first token has no log-probability."""
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        columns["text_offset"] = list(offsets)
        for token_id, entries in zip(token_ids, scores, strict=True):
            if entries is None:
                columns["tokens"].append(self._name_token(token_id, token_text(token_id)))
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
            else:
                self._append(columns, token_id, entries)
        return columns

    def _append(self, columns: dict[str, list[Any]], token_id: int, entries: TokenLogprobs) -> None:
        own = entries[token_id]
        alternatives = _top(entries, self._num_alternatives)
        columns["tokens"].append(self._name_token(token_id, own.decoded_token))
        columns["token_logprobs"].append(_finite(own.logprob))
        columns["top_logprobs"].append(
            {
                self._name_token(other_id, entry.decoded_token): _finite(entry.logprob)
                for other_id, entry in [*alternatives, (token_id, own)]
            }
        )


def join_columns(
    first: dict[str, Any] | None, second: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the columns of one text whose parts these are; None where nothing was asked for."""
    if first is None or second is None:
        return None
    return {name: first[name] + second[name] for name in COLUMNS}


def _own(answer: CompletionOutput) -> list[TokenLogprobs]:
    assert answer.logprobs is not None, "the request asked for logprobs"
    return answer.logprobs


def _describe_entries(entries: TokenLogprobs) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in entries.items()
    }


def _top(entries: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the most likely tokens in order."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
    return ranked[:count]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
