"""The promises that no request gets stuck, checked at every step of a core on a fake executor.

(a) while something waits or runs, a step is launched, the result of one is awaited, or the core is
paused and at rest; (b) what can never fit is refused at the door, with the numbers; (c) the running
request that is first in the policy's order is never retracted; (d) nobody is overtaken for ever;
(e) a request that is ended from outside is in no further plan, and gives up row and blocks with the
next; (f) all invariants hold after every plan and every update, which ``CoreRun`` checks.
"""

from octavo.engine import waiting_queue
from octavo.engine.messages import AbortRequests, PauseScheduling, ResumeScheduling
from octavo.engine.waits import WaitKind

NAMED_EVENTS = {WaitKind.RESULT, WaitKind.DEFERRED}
ORDERED = {"fcfs", "priority"}
"""Policies whose plans look at the queue in its own order."""


class WatchedRun:
    """Steps a core, and holds it to its promises."""

    def __init__(self, run):
        self.run = run
        self._leaving = {}  # number -> history, until a step has been launched
        self._unreported = set()
        self._gone = set()
        self._first = None
        self._num_passed = 0
        self._is_paused = False

    @property
    def scheduler(self):
        return self.run.scheduler

    def end(self, number, message=None):
        """End a request from outside; promise (e) is checked from now on."""
        self.run.core.apply([message or AbortRequests((number,))])
        assert number not in self.scheduler.requests
        assert number not in self.scheduler.running
        self._leaving[number] = self.run.executor._histories.get(number)
        self._unreported.add(number)
        self._gone.add(number)

    def refuse(self, message):
        """Send a request that can never fit; promise (b)."""
        limit = self.run.core.info.max_tokens_per_request
        self.run.core.apply([message])
        assert message.number not in self.scheduler.requests
        self.step()
        final = self.run.finished[message.number]
        assert final.reason == "error"
        for number in (len(message.prompt) // 4, message.max_tokens, limit):
            assert str(number) in final.error

    def pause(self, is_paused):
        """Begin a pause or end it."""
        self._is_paused = is_paused
        self.run.core.apply([PauseScheduling() if is_paused else ResumeScheduling()])

    def step(self):
        """Run one iteration of the core."""
        scheduler, executor = self.scheduler, self.run.executor
        running = sorted(scheduler.running.values(), key=scheduler.policy.order_key)
        waiting = list(scheduler.waiting)
        has_unfinished = scheduler.has_unfinished_requests
        num_launched, num_results = len(executor.steps), executor.num_results
        outputs = self.run.step()
        is_launched = len(executor.steps) > num_launched
        is_read = executor.num_results > num_results
        if self._is_paused:
            assert not is_launched, "(a): a paused core has launched a step"
            assert is_read or not self.run.core.has_work, "(a): a paused core does not rest"
            retracted, admitted = [], []
        else:
            assert is_launched or is_read or not has_unfinished, "(a)"
            retracted, admitted = self._read_plan()
        assert not running or running[0].number not in retracted, "(c)"
        self._check_order(waiting, admitted)
        self._check_gone(is_launched)
        return outputs

    def _read_plan(self):
        """Return the numbers that the last plan has retracted and admitted."""
        plan = next(r for r in reversed(self.scheduler.journal.records) if r[0] == "plan")
        return ([], []) if len(plan) == 2 else (plan[2], [number for number, _, _ in plan[3]])

    def _check_order(self, waiting, admitted):
        """Check (d): who waits for no named event is passed at most a bounded number of times."""
        left = [request for request in waiting if request.number not in admitted]
        left = [request for request in left if not self._awaits_event(request)]
        if self.scheduler.config.policy in ORDERED:
            key = self.scheduler.policy.order_key
            started = [key(request) for request in waiting if request.number in admitted]
            assert not left or not started or max(started) < key(left[0]), "(d)"
        first = waiting[0] if waiting else None
        if first is not self._first:
            self._first, self._num_passed = first, 0
        if left and left[0] is first:
            self._num_passed += len(admitted)
        max_started = self.scheduler.config.max_num_seqs  # in the plan that reaches the bound
        assert self._num_passed < waiting_queue.MAX_PASSED + max_started, "(d)"

    def _awaits_event(self, request):
        return self.scheduler.holdups.reason(request.number).kind in NAMED_EVENTS

    def _check_gone(self, is_launched):
        assert self._unreported <= self.run.finished.keys(), "(e): an end was not reported"
        self._unreported.clear()
        if not is_launched:
            return
        rows = self.run.executor.rows.values()
        for number, history in self._leaving.items():
            assert all(row.history is not history for row in rows), f"(e): {number} keeps its row"
        self._leaving.clear()
        started = {new_row.number for new_row in self.run.executor.steps[-1].new_rows}
        assert self._gone.isdisjoint(started), "(e)"
