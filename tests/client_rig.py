"""The two Python clients behind one face, so that a test is written once and runs on both.

Owns how a blocking client is used from a test's event loop: each call, and each step of an iterator, in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator

from eelgrid import AsyncClient, Client, Retries

QUICK = Retries(pause_first_s=0.01, pause_longest_s=0.05)
_END = object()


class _Later:
    """A call that is made when it is awaited or iterated over."""

    def __init__(self, call):
        self._call = call

    def __await__(self):
        return asyncio.to_thread(self._call).__await__()

    async def __aiter__(self):
        items = self._call()
        try:
            while (item := await asyncio.to_thread(next, items, _END)) is not _END:
                yield item
        finally:
            items.close()


class InThreads:
    """A blocking client whose calls are awaited."""

    def __init__(self, *arguments, **settings):
        self.client = Client(*arguments, **settings)

    def with_timeout(self, timeout_s):
        """A client with another time limit."""
        other = object.__new__(InThreads)
        other.client = self.client.with_timeout(timeout_s)
        return other

    def __getattr__(self, name):
        method = getattr(self.client, name)
        return lambda *arguments, **settings: _Later(lambda: method(*arguments, **settings))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.client.close()


KINDS = {"blocking": InThreads, "asyncio": AsyncClient}


async def collect(items, most=None):
    """The first so many items, or all."""
    found = []
    async for item in items:
        found.append(item)
        if len(found) == most:
            break
    if isinstance(items, AsyncGenerator):
        await items.aclose()
    return found
