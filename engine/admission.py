"""Core process: whether a waiting request may start, and in words with numbers why not."""

from collections.abc import Mapping

from octavo.block_manager.manager import NO_MATCH, BlockManager, Match, MissReason
from octavo.config import SchedulerConfig
from octavo.engine.request import Request
from octavo.engine.waits import AwaitingResult, PrefixDeferral, Wait, WaitKind, WaitReason

THRASH_RETRACTIONS = 2
"""A request retracted so often is not admitted before its whole remainder fits."""


class AdmissionRules:
    """Looks at requests, rows, blocks and budget; takes nothing and starts nothing."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, running: Mapping[int, Request]
    ) -> None:
        self._config = config
        self._block_manager = block_manager
        self._running = running
        self._waits: tuple[Wait, ...] = (
            AwaitingResult(),
            PrefixDeferral(block_manager, running, config.min_deferral_tokens),
        )
        self._no_rows = WaitReason(
            WaitKind.ROWS, f"max_num_seqs ({config.max_num_seqs}) requests are running"
        )
        self._no_tokens = WaitReason(
            WaitKind.TOKENS,
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) of the step are taken",
        )

    def find_limit(self, *, num_free_rows: int, budget: int) -> WaitReason | None:
        """Say what keeps every request from starting."""
        if num_free_rows == 0:
            return self._no_rows
        return self._no_tokens if budget == 0 else None

    def find_wait(self, request: Request) -> WaitReason | None:
        """Say which event the request waits for; those behind may pass it."""
        for wait in self._waits:
            reason = wait.reason(request)
            if reason is not None:
                return reason
        return None

    def match(self, request: Request) -> Match:
        """Return the cached prefix that the request will read."""
        if request.message.skip_reading_prefix_cache:
            return NO_MATCH
        return self._block_manager.match(request.number, request.num_known_tokens)

    def find_lack(self, request: Request, match: Match, growth: int) -> WaitReason | None:
        """Say which blocks are lacking; the first in order may use the whole pool."""
        num_tokens = request.num_known_tokens
        if request.num_retractions >= THRASH_RETRACTIONS:
            num_tokens = request.max_total_tokens
        needed = self._block_manager.num_blocks_taken(match, num_tokens)
        available = self._block_manager.pool.num_available
        if not self._running:
            growth = 0
        if needed + growth <= available:
            return None
        return WaitReason(
            WaitKind.BLOCKS,
            f"needs {needed} blocks and {growth} for the growth of others, {available} available",
        )

    def reason_not_read(self, request: Request) -> MissReason | None:
        """Say why the request's prompt is not looked up in the cache."""
        if request.message.skip_reading_prefix_cache:
            return MissReason.RECOMPUTE
        return None if self._config.enable_prefix_caching else MissReason.DISABLED
