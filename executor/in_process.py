"""The executor that computes in the process of its caller."""

from collections import deque
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.executor.model_runner import ModelRunner
from octavo.executor.step import Executor, Step, StepResult
from octavo.executor.worker import create_runner
from octavo.models.source import ModelSource


def create_executor(config: EngineConfig, source: ModelSource) -> Executor:
    """Load the model and return the executor that ``config`` asks for.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelLoadError: the checkpoint cannot be loaded.
    """
    return InProcessExecutor(create_runner(config, source), lag=1 if config.async_scheduling else 0)


class InProcessExecutor:
    """Computes a step within ``submit``.

    ``lag`` results may be unread when the next step is submitted. They are read once, in order.
    """

    def __init__(self, runner: ModelRunner, *, lag: int) -> None:
        self.info = runner.info
        self._runner: ModelRunner | None = runner
        self._lag = lag
        self._unread: deque[InProcessHandle] = deque()

    def submit(self, step: Step) -> "InProcessHandle":
        """Run a step; what the device raises is raised here."""
        assert self._runner is not None, "submit after shutdown"
        assert len(self._unread) <= self._lag, (
            f"step {step.step_id}: {len(self._unread)} results are unread, lag is {self._lag}"
        )
        handle = InProcessHandle(self._unread, self._runner.run(step))
        self._unread.append(handle)
        return handle

    def shutdown(self) -> None:
        """Free weights and KV pool."""
        self._runner = None


@dataclass(frozen=True, slots=True, eq=False)
class InProcessHandle:
    """A step that has run; its result is handed out once."""

    unread: "deque[InProcessHandle]"
    outcome: StepResult

    def result(self) -> StepResult:
        """Return what the step produced."""
        assert self in self.unread, f"result of step {self.outcome.step_id} asked twice"
        assert self is self.unread[0], "results must be read in the order of submission"
        return self.unread.popleft().outcome
