"""The scraper: asks the replicas of services and jobs for their pages of metrics, each in its turn.

Owns when who is asked, how many at once, and the way from bytes to samples. Must not know
what a page is used for, nor HTTP.

Theory. All pages of one workload are asked for together, so that a window over them is of
one moment; workloads are spread over the interval by a hash of their name, so that the
same fleet is asked at the same moments each time and never all at once. A workload whose
round is still under way when the next is due misses it. Pages are read in one thread
beside the event loop; of each only the lines that are wanted are parsed and kept, so that
a page of a thousand lines costs under a millisecond and not seven, and thousands of
replicas fit into memory. A page in which nothing is wanted is parsed whole, to tell a server that
has not begun to count from one that speaks no metrics at all. The newest round waits to
be taken; one that nobody took is replaced. An address that failed three times in a row
is asked in each fourth round only, so that hosts that hang cannot use up the turns of
those that answer.
"""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from eelgrid_controller.adapters.http_get import Failure, PageRefused
from eelgrid_controller.serving.errors import MetricsUnreadable
from eelgrid_controller.serving.exposition import Scrape, parse
from eelgrid_controller.steward.rounds import Asked, Round

__all__ = ["PAGES_MOST", "Scraper", "due_after", "samples_of"]

# Pages that are asked for in one interval: 1.2 ms each to read and to make windows of (measured, 940 lines), so that
# so many take a third of a core at 15 s.
PAGES_MOST = 4_000
_AT_ONCE = 64
_IDLE_S = 60.0
_FAILURES = 3
_SELDOM = 4


def due_after(name: str, now_s: float, every_s: float) -> float:
    """The next moment after now at which a name is due: every interval, at an offset that its hash gives."""
    offset_s = zlib.crc32(name.encode()) / 2**32 * every_s
    return ((now_s - offset_s) // every_s + 1.0) * every_s + offset_s


def samples_of(page: bytes, names: frozenset[str], at_s: float) -> Scrape:
    """The wanted samples of a page; PageRefused if it is none, or was cut off."""
    try:
        text = page.decode()
    except UnicodeDecodeError:
        raise PageRefused("the page is no text", Failure.CONTENT) from None
    if text and not text.endswith("\n"):
        raise PageRefused("the page breaks off in a line")
    prefixes = tuple(names)
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    try:
        found = parse("\n".join(lines) if lines else text, at_s)
    except MetricsUnreadable as error:
        # The line itself is not told: it is somebody's page, and reasons go to operators and logs.
        raise PageRefused(f"{error.field} is not in Prometheus' text format", Failure.CONTENT) from None
    return Scrape(at_s, MappingProxyType({name: found.samples[name] for name in found.samples if name in names}))


class Scraper:
    """Asks until it is stopped; what is asked changes with `ask`."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[bytes]],
        *,
        every_s: float,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """`get` gives a page or raises PageRefused, in a time that it bounds itself."""
        self.every_s = every_s
        self.pages = 0  # since the start
        self.failures = dict.fromkeys(Failure, 0)
        self._get = get
        self._monotonic_s = monotonic_s
        self._log = log
        self._asked: dict[str, Asked] = {}
        self._due_s: dict[str, float] = {}
        self._rounds: dict[str, Round] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[int, str]] = {}  # by address: how often in a row, and why
        self._changed = asyncio.Event()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pages")

    @property
    def wanted(self) -> int:
        """Pages that are asked for in each interval."""
        return sum(len(one.urls) for one in self._asked.values())

    def ask(self, asked: Mapping[str, Asked]) -> frozenset[str]:
        """From now on ask these, by name, and nobody else; returns those that are too many to ask."""
        now_s, pages = self._monotonic_s(), 0
        kept: dict[str, Asked] = {}
        for name, one in asked.items():
            if pages + len(one.urls) <= PAGES_MOST:
                pages += len(one.urls)
                kept[name] = one
        for name in self._asked.keys() - kept.keys():
            del self._due_s[name]
            self._rounds.pop(name, None)
            if name in self._under_way:
                self._under_way[name].cancel()
        for name in kept.keys() - self._asked.keys():
            self._due_s[name] = due_after(name, now_s, self.every_s)
            self._changed.set()
        self._asked = kept
        if self._failed:
            urls = {url for one in kept.values() for url in one.urls.values()}
            self._failed = {url: failed for url, failed in self._failed.items() if url in urls}
        return frozenset(asked.keys() - kept.keys())

    def take(self) -> dict[str, Round]:
        """The rounds that are new since the last time, by name."""
        taken, self._rounds = self._rounds, {}
        return taken

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                self._changed.clear()
                now_s = self._monotonic_s()
                for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
                    self._due_s[name] = due_after(name, now_s, self.every_s)
                    if name not in self._under_way:
                        self._begin(name, now_s)
                wait_s = min(self._due_s.values(), default=now_s + _IDLE_S) - self._monotonic_s()
                try:
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            rounds = list(self._under_way.values())
            for task in rounds:
                task.cancel()
            await asyncio.gather(*rounds, return_exceptions=True)
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _begin(self, name: str, now_s: float) -> None:
        task = asyncio.create_task(self._round(name, self._asked[name], now_s))
        self._under_way[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, done: asyncio.Task[None]) -> None:
        if self._under_way.get(name) is done:
            del self._under_way[name]
        if not done.cancelled() and (error := done.exception()) is not None:
            self._log.error("workload=%s scrape=broken error=%r", name, error)

    async def _round(self, name: str, asked: Asked, now_s: float) -> None:
        keys = list(asked.urls.items())
        pages = await asyncio.gather(*(self._page(url, asked.names) for _, url in keys))
        if self._asked.get(name) is not None:
            self._rounds[name] = Round(now_s, dict(zip(keys, pages, strict=True)))

    async def _page(self, url: str, names: frozenset[str]) -> Scrape | str:
        """One page, or why there is none."""
        failures, why = self._failed.get(url, (0, ""))
        if failures >= _FAILURES and (failures - _FAILURES + 1) % _SELDOM:
            self._failed[url] = (failures + 1, why)
            return why
        try:
            async with self._at_once:
                at_s = self._monotonic_s()
                page = await self._get(url)
            found = await asyncio.get_running_loop().run_in_executor(self._reader, samples_of, page, names, at_s)
        except PageRefused as error:
            self.failures[error.kind] += 1
            self._failed[url] = (failures + 1, str(error))
            return str(error)
        self.pages += 1
        self._failed.pop(url, None)
        return found
