"""The executor that computes in the process of its caller."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.config import EngineConfig
from octavo.executor.compile_ahead import StartCompiler
from octavo.executor.step import Executor, ExecutorInfo, Step, StepResult
from octavo.executor.worker import create_runner
from octavo.models.source import ModelSource


def create_executor(
    config: EngineConfig, source: ModelSource, compiler: StartCompiler | None = None
) -> Executor:
    """Load the model and return the executor that ``config`` asks for; a GPU needs a compiler.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelLoadError: the checkpoint cannot be loaded.
    """
    runner = create_runner(config, source, compiler)
    return InProcessExecutor(runner, lag=1 if config.async_scheduling else 0)


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    info: ExecutorInfo

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Start to compute a step; returns a function that waits for its result."""

    def prepare(self) -> bool:
        """Do a little of what later steps will need; False when nothing is left to do."""


class InProcessExecutor:
    """Launches a step within ``submit``.

    ``lag`` results may be unread when the next step is submitted. They are read once, in order.
    """

    def __init__(self, runner: Runner, *, lag: int) -> None:
        self.info = runner.info
        self._runner: Runner | None = runner
        self._lag = lag
        self._unread: deque[InProcessHandle] = deque()

    def submit(self, step: Step) -> "InProcessHandle":
        """Launch a step; what launching raises is raised here."""
        assert self._runner is not None, "submit after shutdown"
        assert len(self._unread) <= self._lag, (
            f"step {step.step_id}: {len(self._unread)} results are unread, lag is {self._lag}"
        )
        handle = InProcessHandle(self._unread, step.step_id, self._runner.launch(step))
        self._unread.append(handle)
        return handle

    def prepare(self) -> bool:
        """Let the runner use a time without steps."""
        assert self._runner is not None, "prepare after shutdown"
        return self._runner.prepare()

    def shutdown(self) -> None:
        """Free weights and KV pool."""
        self._runner = None


@dataclass(frozen=True, slots=True, eq=False)
class InProcessHandle:
    """A launched step; its result is handed out once."""

    unread: "deque[InProcessHandle]"
    step_id: int
    wait: Callable[[], StepResult]

    def result(self) -> StepResult:
        """Return what the step produced."""
        assert self in self.unread, f"result of step {self.step_id} asked twice"
        assert self is self.unread[0], "results must be read in the order of submission"
        return self.unread.popleft().wait()
