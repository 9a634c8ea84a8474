"""Requests of one prompt to an engine that takes requests of several."""

from octavo.engine.conditions import Conditions


async def add(engine, prompt, params, **conditions):
    """Admit a request and return its stream."""
    return await engine.add(await engine.prompts.encode([prompt]), params, Conditions(**conditions))


async def read_next(stream):
    _, output = await anext(stream)
    return output


async def read_rest(stream):
    return [output async for _, output in stream]
