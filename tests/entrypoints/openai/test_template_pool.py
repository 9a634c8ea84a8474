"""Conversations are rendered in processes that bound what a template may cost."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from octavo.engine.conversation import ChatOptions
from octavo.engine.template_renderer import MAX_TEXT_CHARACTERS, RenderJob
from octavo.entrypoints.http.errors import HttpError
from octavo.entrypoints.openai import template_pool
from octavo.entrypoints.openai.template_pool import TemplatePool
from octavo.errors import InvalidRequestError

LIMIT_S = 0.5
GREETING = "hello {{ messages[0].content }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": ENDLESS,
    "filters": "{{ range(99999) | map('string') | join | length }}" + ENDLESS,
    "power": "{{ 10 ** (10 ** 9) }}",  # one call of C, which no Python signal interrupts
    "gigabytes": "{{ 'x' * 10 ** 10 }}",
    "padding": "{{ 'x' | center(10 ** 10) }}",
    "doubling": "{% set ns = namespace(t='x') %}{% for i in range(99) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "long text": f"{{{{ 'x' * {MAX_TEXT_CHARACTERS + 1} }}}}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "half a character": "{{ '\\ud800' }}",
}


def job(template, content="you", **options):
    messages = [{"role": "user", "content": content}]
    return RenderJob(
        template=template, messages=messages, options=ChatOptions(**options), special_tokens=()
    )


@asynccontextmanager
async def pool(**options):
    templates = TemplatePool(**{"time_limit_s": LIMIT_S, **options})
    try:
        yield templates
    finally:
        await templates.shutdown()


def test_text_comes_back_and_processes_are_used_again():
    async def run():
        async with pool(num_processes=2) as templates:
            texts = [await templates.render(job(GREETING, str(i))) for i in range(3)]
            assert texts == ["hello 0", "hello 1", "hello 2"]
            assert len(templates.pids) == 1
            long = await asyncio.gather(
                *(templates.render(job(GREETING, c * 10**6)) for c in "aé"),
            )
            assert [len(text) for text in long] == [10**6 + 6] * 2
            assert len(templates.pids) == 2

    asyncio.run(run())


def test_whatever_a_template_costs_it_ends_in_bounded_time_as_the_clients_error():
    async def refuse(templates, name):
        with pytest.raises(InvalidRequestError) as caught:
            await templates.render(job(HOSTILE[name]))
        return caught.value.reason_code

    async def run():
        async with pool(num_processes=len(HOSTILE)) as templates:
            start = time.monotonic()
            reasons = await asyncio.gather(*(refuse(templates, name) for name in HOSTILE))
            assert time.monotonic() - start < 10 * LIMIT_S
            assert await templates.render(job(GREETING)) == "hello you"
        return dict(zip(HOSTILE, reasons, strict=True))

    reasons = asyncio.run(run())
    assert set(reasons.values()) == {"chat_template_too_slow", "chat_template_failed"}
    for name in ("loops", "filters", "power", "gigabytes", "padding", "doubling", "long text"):
        assert reasons[name] == "chat_template_too_slow", name


def test_every_part_of_the_language_works_in_a_confined_process():
    template = (
        "{{ range(9) | map('string') | join | length }} {{ 'a b' | wordwrap(1) | upper }}"
        "{{ messages | pprint }} {{ strftime_now('%d') | int > 0 }} {{ [2, 1] | sort | tojson }}"
    )

    async def run():
        async with pool() as templates:
            return await templates.render(job(template))

    text = asyncio.run(run())
    assert text.startswith("9 A\nB[{'content': 'you', 'role': 'user'}]")
    assert text.endswith(" True [1, 2]")


def test_others_are_rendered_meanwhile():
    async def run():
        async with pool(num_processes=2) as templates:
            await templates.render(job(GREETING))
            slow = asyncio.ensure_future(templates.render(job(ENDLESS)))
            await asyncio.sleep(0)
            assert await templates.render(job(GREETING)) == "hello you"
            assert not slow.done()
            with pytest.raises(InvalidRequestError, match=r"not ended after 0\.5 s"):
                await slow

    asyncio.run(run())


def test_who_waits_too_long_for_a_process_hears_that_the_server_is_busy():
    async def run():
        async with pool(num_processes=1, time_limit_s=0.2) as templates:
            results = await asyncio.gather(
                *(templates.render(job(ENDLESS)) for _ in range(4)), return_exceptions=True
            )
        return [type(result) for result in results]

    kinds = asyncio.run(run())
    assert kinds[0] is InvalidRequestError
    assert kinds[-1] is HttpError


def run_as_the_server(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


@pytest.mark.parametrize("run_loop", [asyncio.run, run_as_the_server])
@pytest.mark.parametrize("noticing_s", [0, 0.1], ids=["at once", "when it was noticed"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_killed_while_they_were_idle_cost_nobody_anything(run_loop, noticing_s, number):
    async def run():
        async with pool(num_processes=3) as templates:
            await asyncio.gather(*(templates.render(job(GREETING)) for _ in range(3)))
            pids = templates.pids
            assert len(pids) == 3
            for pid in pids:
                os.kill(pid, number)
            await asyncio.sleep(noticing_s)
            texts = await asyncio.gather(*(templates.render(job(GREETING)) for _ in range(6)))
            assert texts == ["hello you"] * 6
            assert not pids & templates.pids

    run_loop(run())


def test_a_conversation_that_kills_every_process_is_refused(monkeypatch, tmp_path):
    (tmp_path / "killed.py").write_text(
        "import os, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), 9)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(template_pool, "MODULE", "killed")

    async def run():
        async with pool(num_processes=3) as templates:
            await asyncio.gather(*(templates.warm_up() for _ in range(3)))
            started = templates.pids
            with pytest.raises(InvalidRequestError, match="its process ended with status -9"):
                await templates.render(job(GREETING))
            assert len(started - templates.pids) == 1, "it is tried on one idle and one new process"

    asyncio.run(run())


def test_process_that_cannot_work_is_the_servers_fault(monkeypatch):
    async def run():
        async with pool() as templates:
            await templates.render(job(GREETING))

    monkeypatch.setattr(template_pool, "MODULE", "octavo.no_such_module")
    with pytest.raises(RuntimeError, match="status 1"):
        asyncio.run(run())
    monkeypatch.setattr(template_pool.sys, "executable", "/no/such/program")
    with pytest.raises(HttpError, match="no room") as caught:
        asyncio.run(run())
    assert caught.value.status == 503


def test_shutdown_ends_processes_that_work():
    async def run():
        async with pool(time_limit_s=60) as templates:
            task = asyncio.ensure_future(templates.render(job(ENDLESS)))
            while not templates.pids:
                await asyncio.sleep(0.01)
            pids = templates.pids
        with pytest.raises(InvalidRequestError):
            await task
        return pids

    for pid in asyncio.run(run()):
        assert not Path(f"/proc/{pid}").exists()


def test_process_has_no_secrets_and_cannot_write_files(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")

    async def run():
        async with pool() as templates:
            await templates.render(job(GREETING))
            (pid,) = templates.pids
            folder = Path(f"/proc/{pid}")
            return (folder / "environ").read_bytes(), (folder / "limits").read_text()

    environment, limits = asyncio.run(run())
    assert b"secret" not in environment
    rows = {line[:26].strip(): line[26:].split() for line in limits.splitlines()}
    assert rows["Max file size"][:2] == rows["Max processes"][:2] == ["0", "0"]


@pytest.mark.parametrize("value", [2**70, "\ud83d"], ids=["huge", "half a character"])
def test_what_cannot_travel_is_the_clients_error(value):
    async def run():
        async with pool() as templates:
            await templates.render(job(GREETING, template_arguments={"x": value}))

    with pytest.raises(InvalidRequestError, match="cannot be given to a template"):
        asyncio.run(run())
