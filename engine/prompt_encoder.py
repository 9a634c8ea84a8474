"""API process: prompts into token ids, long ones in a small pool of threads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from octavo.engine.prompt import PLAIN, EncodedPrompt, EncodeOptions, Prompt
from octavo.engine.request_tracker import RequestTracker
from octavo.sampling_params import SamplingParams

Result = TypeVar("Result")

LONG_PROMPT_CHARACTERS = 2_000
"""Longer texts are encoded in the pool: about half a millisecond of the event loop's time."""
IDS_PER_CHARACTER = 4
"""Token ids that take as long to read as a character takes to encode."""
MANY_BAD_WORDS = 16
NUM_THREADS = 4


class PromptEncoder:
    """Owns the pool; what is short is done at once, on the event loop."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encode")

    async def encode(
        self, prompts: Sequence[Prompt], options: EncodeOptions = PLAIN
    ) -> list[EncodedPrompt]:
        """Read prompts.

        Raises:
            InvalidRequestError: a prompt is empty, far too long or of an unknown form.
        """

        def encode() -> list[EncodedPrompt]:
            return [self._tracker.encode(prompt, options) for prompt in prompts]

        if sum(map(_estimate_work, prompts)) <= LONG_PROMPT_CHARACTERS:
            return encode()
        return await self.run(encode)

    async def encode_bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return the token sequences that ``params`` forbid.

        Raises:
            InvalidRequestError: there is no tokenizer to read the words.
        """
        if len(params.bad_words or ()) <= MANY_BAD_WORDS:
            return self._tracker.encode_bad_words(params)
        return await self.run(lambda: self._tracker.encode_bad_words(params))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run something slow in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def shutdown(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False)


def _estimate_work(prompt: Prompt) -> int:
    """Return how much there is to encode, in characters of a text."""
    if isinstance(prompt, EncodedPrompt):
        return 0
    content: Any = prompt
    if isinstance(prompt, dict):
        content = prompt.get("prompt_token_ids") or prompt.get("prompt")
    if isinstance(content, str):
        return len(content)
    return len(content) // IDS_PER_CHARACTER if isinstance(content, Sequence) else 0
