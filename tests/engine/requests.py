"""Builders of requests, schedulers and cores with defaults."""

from dataclasses import dataclass

from octavo.block_manager.hashing import KeyChain, root_key
from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.journal import Journal
from octavo.engine.messages import AddRequest, pack_ids, unpack_ids
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.executor.step import RowSampling
from tests.fake_executor import FakeExecutor

EOS = 1


def make_add(number=0, prompt=5, *, max_tokens=8, sampling=None, **fields):
    """Build an AddRequest; ``prompt`` is token ids, or a length of ids nobody else has."""
    ids = [1_000 * number + 10 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return AddRequest(
        number=number,
        request_id=str(number),
        prompt=pack_ids(ids),
        sampling=sampling or RowSampling(seed=0),
        max_tokens=max_tokens,
        arrival_s=fields.pop("arrival_s", 0.0),
        eos_ids=fields.pop("eos_ids", (EOS,)),
        **fields,
    )


def make_config(**fields):
    """Build a SchedulerConfig of a small pool in which nothing is held back for growth."""
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "conservativeness": 0.0,
    }
    return SchedulerConfig(**{**defaults, **fields})


def make_scheduler(**fields):
    """Build a Scheduler."""
    return Scheduler(make_config(**fields))


def add_request(scheduler, number=0, prompt=5, **fields):
    """Add a request to a scheduler without an engine core; returns it."""
    message = make_add(number, prompt, **fields)
    chain = KeyChain(root_key(b"test"), scheduler.config.block_size, cache_salt=message.cache_salt)
    chain.extend(unpack_ids(message.prompt).tolist())
    request = Request(message)
    scheduler.add(request, chain)
    return request


@dataclass
class CoreRun:
    """A core on a fake executor, and everything it has reported."""

    core: EngineCore
    executor: FakeExecutor
    tokens: dict
    finished: dict
    num_steps: int = 0

    @property
    def scheduler(self):
        return self.core.scheduler

    def step(self):
        """Run one iteration, check all invariants, and collect what it reports."""
        outputs = self.core.step()
        self.scheduler.check_invariants()
        self.num_steps += 1
        if outputs is None:
            return None
        token_ids = unpack_ids(outputs.token_ids).tolist()
        for number, token_id in zip(outputs.numbers, token_ids, strict=True):
            assert number not in self.finished, f"{number} got a token after its end"
            self.tokens.setdefault(number, []).append(token_id)
        for final in outputs.finished:
            assert final.number not in self.finished, f"{final.number} finished twice"
            self.finished[final.number] = final
        return outputs

    def run(self, messages=(), *, max_steps=2_000):
        """Apply messages and run until nothing is left; returns the tokens by request number."""
        self.core.apply(messages)
        while self.core.has_work:
            self.step()
            assert self.num_steps < max_steps, f"not done after {max_steps} steps"
        return self.tokens


def make_core(*, lag=0, executor_options=None, **fields):
    """Build a core on a fake executor of the same shape."""
    config = make_config(**fields)
    executor = FakeExecutor(
        config.num_blocks,
        config.block_size,
        lag,
        num_rows=config.max_num_seqs,
        vocab_size=1_000_000,
        **(executor_options or {}),
    )
    journal = Journal(config, ring_size=None)
    core = EngineCore(executor, config, lag=lag, journal=journal, clock=lambda: 0.0)
    _check_after(core.scheduler, "plan")
    _check_after(core.scheduler, "update")
    return CoreRun(core, executor, {}, {})


def _check_after(scheduler, name):
    """Let a method of one scheduler end with a check of all invariants."""
    method = getattr(scheduler, name)

    def checked(argument):
        result = method(argument)
        scheduler.check_invariants()
        return result

    setattr(scheduler, name, checked)
