"""Waiting for what becomes true by itself: on the event loop, by asking a server, and in a plain thread."""

import asyncio
import contextlib
import time

from eelgrid_controller.engines.kubernetes.api.errors import ObjectNotFound


async def wait_until(condition, *, within_s=30.0):
    """Waits on the event loop until the condition holds; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # any state of any object
            await asyncio.sleep(0.005)


async def wait_for(ask, *, within_s=30.0):
    """What awaiting `ask()` gives as soon as it is true; an object that is not there yet is asked for again."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(ObjectNotFound):
                if found := await ask():
                    return found
            await asyncio.sleep(0.02)


def poll_until(condition, what="", *, within_s=30.0):
    """What the condition gives once it is true; blocks the thread. Raises AssertionError with `what`."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)
    return found
