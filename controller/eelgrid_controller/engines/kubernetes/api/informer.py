"""Informer: the objects of one kind held in memory, kept up to date by list and watch.

`ObjectStore` is the pure part: it applies lists and watch events, and says what differs from before (deltas).
"""

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.api.errors import (
    Backoff,
    ClusterError,
    ClusterUnreachable,
    Expired,
    NotServed,
    retry_after_s,
)
from eelgrid_controller.engines.kubernetes.api.port import (
    PAGE_SIZE,
    ClusterClient,
    Object,
    ObjectKey,
    ObjectList,
    Resource,
    WatchEvent,
    WatchEventType,
    key_of,
    uid_of,
    version_of,
)
from eelgrid_controller.errors import ControllerError


class TooManyObjects(ControllerError):
    """More objects of a kind than may be held."""


class DeltaType(Enum):
    """Kind of change of an object."""

    ADDED = auto()
    MODIFIED = auto()
    DELETED = auto()


class Delta(NamedTuple):
    """A change of one object; `old` is None where it was added, `new` where it was deleted."""

    what: DeltaType
    key: ObjectKey
    old: Object | None
    new: Object | None

    @property
    def uid(self) -> str:
        """The uid of the object, as it is or was."""
        found = self.old if self.new is None else self.new
        assert found is not None
        return uid_of(found)


class ObjectStore:
    """The objects of one kind as they are known."""

    def __init__(self, *, most: int, keep: Callable[[Object], Object] | None = None) -> None:
        """`keep` gives what is kept of an object; its name, namespace, uid and version must be.

        What is listed or told is taken over, without its `kind` and `apiVersion`.
        """
        self._most = most
        self._keep = keep
        self._objects: dict[ObjectKey, Object] = {}

    @property
    def objects(self) -> Mapping[ObjectKey, Object]:
        """All of them, as they are at any moment; not to be changed."""
        return MappingProxyType(self._objects)

    def replace(self, items: Iterable[Object]) -> list[Delta]:
        """The differences that a whole list makes; TooManyObjects leaves all as it was."""
        listed: dict[ObjectKey, Object] = {}
        for item in items:
            found = self._kept(item)
            listed[key_of(found)] = found
        if len(listed) > self._most:
            raise TooManyObjects(
                f"{len(listed)} objects, of which {self._most} may be held", "raise the bound, or select fewer of them"
            )
        deltas = [Delta(DeltaType.DELETED, key, old, None) for key, old in self._objects.items() if key not in listed]
        for delta in deltas:
            del self._objects[delta.key]
        for key, found in listed.items():
            # A list is right whatever was held: after a restore from a backup versions are lower.
            old = self._objects.get(key)
            if old is None or version_of(old) != version_of(found):
                deltas += self._put(found)
        return deltas

    def apply_change(self, change: WatchEvent) -> list[Delta]:
        """The differences that an event makes: none, one, or two where a name was taken over."""
        if change.told is WatchEventType.BOOKMARK:
            return []
        found = self._kept(change.object)
        key = key_of(found)
        old = self._objects.get(key)
        if change.told is WatchEventType.DELETED:
            if old is None or not _is_newer(found, old):
                return []
            del self._objects[key]
            return [Delta(DeltaType.DELETED, key, old, None)]
        if old is None and len(self._objects) >= self._most:
            raise TooManyObjects(
                f"over {self._most} objects, which is all that may be held", "raise the bound, or select fewer of them"
            )
        return [] if old is not None and not _is_newer(found, old) else self._put(found)

    def _kept(self, found: Object) -> Object:
        # A watch says what kind an object is, a list does not: the same object is held alike.
        found.pop("kind", None)
        found.pop("apiVersion", None)
        return found if self._keep is None else self._keep(found)

    def _put(self, found: Object) -> list[Delta]:
        key = key_of(found)
        old = self._objects.get(key)
        self._objects[key] = found
        if old is None:
            return [Delta(DeltaType.ADDED, key, None, found)]
        if uid_of(old) != uid_of(found):
            return [Delta(DeltaType.DELETED, key, old, None), Delta(DeltaType.ADDED, key, None, found)]
        return [Delta(DeltaType.MODIFIED, key, old, found)]


def _is_newer(found: Object, old: Object) -> bool:
    new, was = version_of(found), version_of(old)
    if new.isdigit() and was.isdigit():
        return int(new) > int(was)
    return new != was


def drop_managed_fields(found: Object) -> Object:
    """An object without the list of who wrote which field; of large objects most of the bytes."""
    return {**found, "metadata": {key: value for key, value in found["metadata"].items() if key != "managedFields"}}


_PAGES_MOST = 2_000
_MOVED_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class InformerSelector:
    """Which objects of a kind."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InformerTiming:
    """How long and how often."""

    watch_s: float = 300.0  # after which the server ends a watch, and another goes on
    silent_s: float = 150.0  # without a word, bookmarks included, a watch is broken
    lived_s: float = 5.0  # after which a watch counts as a success
    first_wait_s: float = 0.2
    most_wait_s: float = 30.0


_EVERYTHING = InformerSelector()
_PACE = InformerTiming()


class Informer:
    """Holds all objects of one kind, listed and watched; `run` until it is cancelled."""

    def __init__(
        self,
        cluster: ClusterClient,
        resource: Resource,
        *,
        rng: random.Random,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
        selection: InformerSelector = _EVERYTHING,
        keep: Callable[[Object], Object] | None = None,
        most: int = 100_000,
        pace: InformerTiming = _PACE,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`keep` prunes objects to what is needed; `most` bounds how many are held."""
        self.resource = resource
        self.lists = 0  # since the start
        self.watches = 0
        self.failures = 0
        self.last_error: ClusterError | None = None
        self._cluster = cluster
        self._selection = selection
        self._pace = pace
        self._monotonic_s = monotonic_s
        self._log = log
        self._sleep = sleep
        self._held = ObjectStore(most=most, keep=keep)
        self._heard: list[Callable[[Sequence[Delta]], None]] = []
        self._version = ""  # empty: list first
        self._word_s: float | None = None
        self._synced = asyncio.Event()
        self._listed = asyncio.Event()  # set, and cleared at once, with each list
        self._list_began_s = -math.inf  # of the last that was read whole
        self._wants_list = False
        self._limit: asyncio.Timeout | None = None  # of the watch that runs
        self._backoff = Backoff(rng, first_s=pace.first_wait_s, most_s=pace.most_wait_s)

    @property
    def objects(self) -> Mapping[ObjectKey, Object]:
        """The objects by namespace and name; read-only."""
        return self._held.objects

    @property
    def is_synced(self) -> bool:
        """Whether a whole list has been read since the start."""
        return self._synced.is_set()

    @property
    def version(self) -> str:
        """The resource version up to which what is held is right; empty before the first list."""
        return self._version

    async def wait_synced(self) -> None:
        """Wait for the first whole list."""
        await self._synced.wait()

    async def wait_listed_since(self, at_s: float) -> None:
        """Wait until everything was listed by a list that began at this time or later; the watch is ended for it."""
        while self._list_began_s < at_s:
            self._wants_list = True
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())
            await self._listed.wait()

    def age_s(self) -> float | None:
        """For how long the server has said nothing, None before its first word."""
        return None if self._word_s is None else self._monotonic_s() - self._word_s

    def add_listener(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Call a callback with deltas from now on; what is held already is not reported again."""
        self._heard.append(callback)

    async def run(self) -> None:
        """List and watch until cancelled; TooManyObjects ends it."""
        while True:
            began_s = self._monotonic_s()
            try:
                if self._wants_list or not self._version:
                    await self._list()
                await self._follow_changes()
                if self._wants_list:
                    continue
                # A server that ends each watch at once, without an error, is waited for as one that fails.
                if self._monotonic_s() - began_s >= self._pace.lived_s:
                    self._backoff.reset()
                    continue
                wait_s = self._backoff.next_wait_s()
            except Expired as error:
                self._on_failure(error)
                self._version = ""
                wait_s = self._backoff.next_wait_s()
            except ClusterError as error:
                self._on_failure(error)
                if self._monotonic_s() - began_s >= self._pace.lived_s:
                    self._backoff.reset()
                wait_s = self._backoff.next_wait_s(retry_after_s(error))
                if isinstance(error, NotServed):
                    wait_s = self._pace.most_wait_s
            await self._sleep(wait_s)

    def _on_failure(self, error: ClusterError) -> None:
        self.failures += 1
        self.last_error = error
        self._log.warning("watch=%s version=%s error=%s", self.resource.title, self._version or "none", error)

    async def _list(self) -> None:
        """Read everything; hold it when all pages have come."""
        began_s = self._monotonic_s()
        chosen = self._selection
        items: list[Object] = []
        after = ""
        for _ in range(_PAGES_MOST):
            page: ObjectList = await self._cluster.list(
                self.resource,
                namespace=chosen.namespace,
                labels=chosen.labels,
                fields=chosen.fields,
                limit=PAGE_SIZE,
                after=after,
            )
            self._word_s = self._monotonic_s()
            items += page.items
            after = page.after
            if not after:
                break
        self.lists += 1
        self._notify_listeners(self._held.replace(items))
        self._version = page.resource_version
        self._list_began_s, self._wants_list = began_s, False
        self._synced.set()
        self._listed.set()
        self._listed.clear()

    async def _follow_changes(self) -> None:
        """Follow the changes until the watch ends."""
        chosen = self._selection
        self.watches += 1
        watch = self._cluster.watch_changes(
            self.resource,
            resource_version=self._version,
            namespace=chosen.namespace,
            labels=chosen.labels,
            fields=chosen.fields,
            timeout_s=self._pace.watch_s,
        )
        async with aclosing(watch) as changes:
            try:
                # The limit is moved on now and then, not with each event: a tenth of it either way is no matter.
                async with asyncio.timeout(self._pace.silent_s) as limit:
                    self._limit = limit
                    await self._follow(changes, limit)
            except TimeoutError:
                if self._wants_list:
                    return
                # A server that came back from a backup says nothing either, to who asks from a version ahead of its own.
                self._version = ""
                raise ClusterUnreachable(
                    f"watch {self.resource.title}: silent for {self._pace.silent_s:g} s", is_sent=True
                ) from None
            finally:
                self._limit = None

    async def _follow(self, changes: AsyncGenerator[WatchEvent, None], limit: asyncio.Timeout) -> None:
        """Tell changes as they come; what is told must not raise TimeoutError."""
        clock = asyncio.get_running_loop()
        moved_s = clock.time()
        async for change in changes:
            self._word_s = self._monotonic_s()
            if (now_s := clock.time()) - moved_s > _MOVED_SHARE * self._pace.silent_s:
                moved_s = now_s
                limit.reschedule(now_s + self._pace.silent_s)
            version = version_of(change.object)
            if _is_before(version, self._version):
                raise Expired(f"watch {self.resource.title}: versions went back to {version}", "list again")
            self._notify_listeners(self._held.apply_change(change))
            self._version = version

    def _notify_listeners(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            for callback in self._heard:
                callback(deltas)


def _is_before(version: str, other: str) -> bool:
    return version.isdigit() and other.isdigit() and int(version) < int(other)
