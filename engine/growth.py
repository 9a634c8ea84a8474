"""Core process: how many blocks the running requests are expected to grow by."""

from collections.abc import Iterable
from enum import StrEnum

from octavo.block_manager.block_table import BlockSpec
from octavo.engine.request import Request

INITIAL_RATIO = 0.7
FINAL_RATIO = 0.14  # of the initial one; start, end and steps as in SGLang's new-token-ratio
NUM_DECAY_STEPS = 600
MAX_TOKENS_COUNTED = 4096


class RetractionCause(StrEnum):
    """Who needed the block for whose lack a request was retracted."""

    OWN_GROWTH = "own_growth"
    """The request itself: it is the last in the policy's order."""
    OTHERS_GROWTH = "others_growth"
    """A request before it."""


class GrowthEstimate:
    """Expects every running request to produce ``ratio`` of the tokens it may still produce.

    The ratio decays while all goes well and rises after a retraction to what the running set turned
    out to need, so admission learns how long answers are. Conservativeness 0 expects no growth at
    all.
    """

    def __init__(self, spec: BlockSpec, conservativeness: float) -> None:
        self._spec = spec
        self._initial = INITIAL_RATIO * conservativeness
        self._final = FINAL_RATIO * self._initial
        self.ratio = self._initial

    def num_blocks(self, running: Iterable[Request]) -> int:
        """Return the blocks that running requests are expected to add."""
        ratio, most, size = self.ratio, MAX_TOKENS_COUNTED, self._spec.block_size
        remaining = [request.max_total_tokens - request.num_tokens for request in running]
        # As ``blocks_needed`` has it, without a call for every running request in every plan.
        return sum([-(-int(ratio * (num if num < most else most)) // size) for num in remaining])

    def decay(self) -> None:
        """Expect a little less: a step was planned without a retraction."""
        self.ratio = max(self._final, self.ratio - (self._initial - self._final) / NUM_DECAY_STEPS)

    def learn(self, running: Iterable[Request]) -> None:
        """Expect at least what the running set has used of its limits: a retraction happened."""
        num_produced = num_allowed = 0
        for request in running:
            num_produced += request.num_tokens - request.num_prompt_tokens
            num_allowed += min(
                request.max_total_tokens - request.num_prompt_tokens, MAX_TOKENS_COUNTED
            )
        if num_allowed and self._initial:
            self.ratio = min(1.0, max(self.ratio, num_produced / num_allowed))
