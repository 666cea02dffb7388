"""Searches in threads on behalf of callers who may go away.

A thread cannot be ended from outside. So whoever bounds how many searches run at once must count one until its thread has ended,
and not only as long as somebody waits for it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def search_to_end(search: Callable[[], _Result]) -> _Result:
    """Returns the result of a search in a thread; ends no sooner than that does, also if its caller goes away."""
    searching = asyncio.ensure_future(asyncio.to_thread(search))
    try:
        return await asyncio.shield(searching)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await searching
        raise
