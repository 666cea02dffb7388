"""An open-loop load generator: requests come at a rate whatever becomes of those before, and each is timed from when it was due.

Owns when requests are sent, and how long each took. Must not know who serves them. The rate may be changed at any time.

Theory. A generator that waits for an answer before it sends the next request slows down with the server, and so hides the very
queue that it should show (coordinated omission); here a request that is sent late counts from when it was due.
"""

import asyncio
import threading
import time
from typing import NamedTuple

import aiohttp

_TIMEOUT_S = 120.0


class Answer(NamedTuple):
    """When a request was due, how long after that it was answered, and why not if it was not."""

    due_s: float
    took_s: float
    failure: str


class OpenLoop:
    """Sends GET requests from a thread of its own while its block runs; at the end of the block it waits for all answers."""

    def __init__(self, url, rate_hz):
        self.answers, self.rate_hz, self.sent = [], rate_hz, 0
        self._url, self._is_done = url, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *reason):
        self._is_done.set()
        self._thread.join()

    @property
    def failures(self):
        return [one.failure for one in list(self.answers) if one.failure]

    @property
    def waiting(self):
        """How many requests are sent and not answered."""
        return self.sent - len(self.answers)

    def quantile(self, level, *, since_s):
        """The quantile of the times of requests that were due since then."""
        took_s = sorted(one.took_s for one in list(self.answers) if one.due_s >= since_s)
        return took_s[min(len(took_s) - 1, int(level * len(took_s)))]

    async def _run(self):
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks, due_s = set(), time.monotonic()
            while not self._is_done.is_set():
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                task = asyncio.create_task(self._ask(session, due_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                self.sent += 1
                due_s += 1.0 / self.rate_hz
            await asyncio.gather(*tasks)

    async def _ask(self, session, due_s):
        failure = ""
        try:
            async with session.get(self._url) as answer:
                text = await answer.text()
                failure = "" if answer.status == 200 else f"{answer.status} {text[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = f"{type(error).__name__} {error}"
        self.answers.append(Answer(due_s, time.monotonic() - due_s, failure))
