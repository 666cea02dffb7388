"""Reconciler: the base of every loop that makes a cluster as it should be.

A subclass says what to watch (`start`), when it may work (`is_ready`) and what to do for one key (`reconcile`). The
base has everything else once, in the words of controller-runtime: the work queue, leadership terms, retries with
backoff, resyncs, Events, background tasks, shutdown, and the restart from lists after an error nobody expected.

    watch, commit, resync --add(key)--> WorkQueue --one at a time, while ready--> reconcile(key) -> Result
          ClusterError: logged, counted, key comes back with backoff
          any other error: logged, counted, the whole reconciler begins again from lists after RESTART_S

The smallest of them is here, too: it labels the pod of the leader, so that a Service reaches the one replica that leads.
"""

import asyncio
import heapq
import itertools
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.election import Elector, LeadershipTerm, is_of
from eelgrid_controller.engines.kubernetes.api.errors import (
    Backoff,
    ClusterError,
    ObjectNotFound,
    RetryLimits,
    StaleTerm,
    call_with_retries,
    retry_after_s,
)
from eelgrid_controller.engines.kubernetes.api.informer import Informer, InformerSelector
from eelgrid_controller.engines.kubernetes.api.port import EVENTS, PODS, ClusterClient, Object, Resource
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference, build_event

T = TypeVar("T")
KeyT = TypeVar("KeyT", bound=Hashable)
EventT = TypeVar("EventT")

RESTART_S = 5.0  # between a run that failed and the next
_READY_POLL_S = 0.5  # between looks whether a reconciler may work
_WRITE_LIMITS = RetryLimits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_FIRST_RETRY_S = 0.5
_MAX_CONCURRENT_WRITES = 8
# Events that wait to be sent: some hundred kilobytes. API servers limit them per source; 50 a second is far below.
_MAX_QUEUED_EVENTS = 1_000
_EVENT_INTERVAL_S = 0.02

# The key of a reconciler that decides about all objects of the cluster together.
CLUSTER_KEY = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """What every reconciler of a cluster uses; `identity` is that of this process in Events and the Lease."""

    cluster: ClusterClient
    elector: Elector
    identity: str
    clock: Clock
    rng: random.Random
    log: logging.Logger


class WorkQueue(Generic[KeyT]):
    """Keys that wait to be reconciled, each once, served in the order in which they are due."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._due_s: dict[KeyT, float] = {}
        self._rests_until_s: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []  # may hold entries that an earlier due time has replaced
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: KeyT, after_s: float = 0.0) -> None:
        """Have a key reconciled after so many seconds, or earlier where that is planned already."""
        due_s = max(self._monotonic_s() + after_s, self._rests_until_s.get(key, 0.0))
        if due_s >= self._due_s.get(key, float("inf")):
            return
        self._due_s[key] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), key))
        self._changed.set()

    def rest(self, key: KeyT, seconds: float) -> None:
        """Keep a key that was served from being served again for so many seconds, however often it is added."""
        until_s = self._rests_until_s[key] = self._monotonic_s() + seconds
        if self._due_s.get(key, until_s) < until_s:
            self._due_s[key] = until_s
            heapq.heappush(self._heap, (until_s, next(self._numbers), key))

    def hurry(self, key: KeyT) -> None:
        """Have a key reconciled now, even if it rests."""
        self._rests_until_s.pop(key, None)
        self.add(key)

    async def get(self) -> KeyT:
        """Wait for the next key that is due, and take it out of the queue."""
        while True:
            self._changed.clear()
            now_s = self._monotonic_s()
            while self._heap:
                due_s, _, key = self._heap[0]
                if self._due_s.get(key) != due_s:
                    heapq.heappop(self._heap)
                    continue
                if due_s > now_s:
                    break
                heapq.heappop(self._heap)
                del self._due_s[key]
                return key
            wait_s = self._heap[0][0] - now_s if self._heap else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass


class ParseCache(Generic[KeyT, T]):
    """Objects parsed once for each of their resource versions."""

    def __init__(self, parse: Callable[[Object], T]) -> None:
        """`parse` may raise KubernetesUnreadable."""
        self._parse = parse
        self._parsed: dict[KeyT, tuple[str, T | None]] = {}

    def get(self, key: KeyT, found: Object) -> T | None:
        """What an object parses to; None where it cannot be read."""
        version = str(found["metadata"].get("resourceVersion", ""))
        known = self._parsed.get(key)
        if known is None or known[0] != version:
            try:
                known = version, self._parse(found)
            except KubernetesUnreadable:
                known = version, None
            self._parsed[key] = known
        return known[1]

    def retain(self, keys: Collection[KeyT]) -> None:
        """Forget all objects but these."""
        if len(self._parsed) > len(keys):
            self._parsed = {key: self._parsed[key] for key in keys if key in self._parsed}


class EventInbox(Generic[EventT]):
    """Events for a pure state machine, in order; the first that comes wakes the machine's reconciler."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: deque[EventT] = deque()

    def put(self, event: EventT) -> None:
        """Add an event for the next reconcile."""
        self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    def drain(self) -> list[EventT]:
        """Take out all events that came since the last call."""
        events, self._events = list(self._events), deque()
        return events


class EventRecorder:
    """Creates Events about objects in the background, a few a second; `run` it.

    Where more wait than the queue holds, the oldest is dropped, and one that the server refuses is not repeated: an
    Event informs people, nothing is decided by it. Routine ones (`is_routine`) wait in a queue of their own until no
    other is left, so that a burst of them delays and drops none that somebody has to act on.
    """

    def __init__(self, cluster: ClusterClient, *, identity: str, clock: Clock, log: logging.Logger) -> None:
        self.sent = 0
        self.dropped = 0
        self._cluster = cluster
        self._identity = identity
        self._clock = clock
        self._log = log
        self._queue: deque[tuple[EventReference, dict[str, Any]]] = deque()
        self._routine: deque[tuple[EventReference, dict[str, Any]]] = deque()
        self._queued = asyncio.Event()

    def record(
        self,
        about: EventReference,
        text: str,
        *,
        is_warning: bool,
        reason: str,
        action: str,
        is_routine: bool = False,
    ) -> None:
        """Queue an Event about an object."""
        queue = self._routine if is_routine else self._queue
        if len(queue) >= _MAX_QUEUED_EVENTS:
            queue.popleft()
            self.dropped += 1
        now_ns = self._clock.now_ns()
        event = build_event(
            about, text, is_warning=is_warning, reason=reason, action=action, identity=self._identity, now_ns=now_ns
        )
        queue.append((about, event))
        self._queued.set()

    async def run(self) -> None:
        """Send what is queued until cancelled."""
        while True:
            await self._queued.wait()
            while queue := self._queue or self._routine:
                about, event = queue.popleft()
                try:
                    await self._cluster.create(EVENTS, event, namespace=event["metadata"]["namespace"])
                except ClusterError as error:
                    self.dropped += 1
                    self._log.debug("%s=%s event=dropped error=%s", about.kind.lower(), about.name, error)
                else:
                    self.sent += 1
                await asyncio.sleep(_EVENT_INTERVAL_S)
            self._queued.clear()


class BackgroundTasks:
    """Background tasks of one loop, which end with it."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """`what` is how the log names the loop."""
        self._log = log
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it as a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    async def end(self) -> None:
        """Cancel all, and wait until they are gone."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("%s=task_failed", self._what, exc_info=task.exception())


class Result(NamedTuple):
    """When a key is to be reconciled again, in seconds; None for no sooner than something adds it."""

    requeue_after_s: float | None = None


class Reconciler(ABC, Generic[KeyT]):
    """Base of the reconcilers of one cluster; `run` until it is cancelled.

    `failures` counts runs, reconciles and writes that failed.
    """

    resync_s: float | None = None  # between calls of `resync`; None for none
    rest_s = 0.0  # between the end of one reconcile of a key and the next, in which events gather
    ready_poll_s = _READY_POLL_S
    retry_most_s = 30.0  # the longest wait before a key that failed is reconciled again

    def __init__(
        self,
        context: ClusterContext,
        name: str,
        *,
        limits: RetryLimits = _WRITE_LIMITS,
        max_concurrent_writes: int = _MAX_CONCURRENT_WRITES,
    ) -> None:
        """`name` is how logs call it; `limits` bound the attempts of one write."""
        self.failures = 0
        self.is_started = False  # what `start` waits for is known
        self.context = context
        self.cluster = context.cluster
        self.clock = context.clock
        self.log = context.log.getChild(name)
        self.queue: WorkQueue[KeyT] = WorkQueue(context.clock.monotonic_s)
        self.tasks = BackgroundTasks(self.log, name)
        self.events = EventRecorder(context.cluster, identity=context.identity, clock=context.clock, log=self.log)
        self._name = name
        self._backoffs: dict[KeyT, Backoff] = {}
        self._limits = limits
        self._write_slots = asyncio.Semaphore(max_concurrent_writes)

    # What a reconciler defines

    @abstractmethod
    async def reconcile(self, key: KeyT, /) -> Result | None:
        """Bring one key to where it should be; may raise ClusterError, and is then called again after a wait."""

    def reset(self) -> None:
        """Forget what a run that failed has learned; the next one begins from lists."""

    async def start(self, group: asyncio.TaskGroup, /) -> None:
        """Start informers in `group`, and return when what they hold is known as a whole."""

    def is_ready(self) -> bool:
        """Whether keys may be reconciled now; they wait in the queue meanwhile.

        By default: once `start` has returned, while this controller leads.
        """
        return self.is_started and self.term() is not None

    async def begin_term(self, epoch: int, /) -> None:
        """Prepare for a term, before its first key and after each time that the reconciler was not ready."""

    def resync(self) -> None:
        """Called each `resync_s` seconds from the beginning of a run: add the keys that nothing else may have added."""

    def stop(self) -> None:
        """A run is over; its tasks have been cancelled."""

    # What a reconciler uses

    def term(self) -> LeadershipTerm | None:
        """The leadership term that runs at this moment."""
        return self.context.elector.term()

    def leads(self, epoch: int) -> bool:
        """Whether this controller leads in that epoch at this moment."""
        return is_of(self.term(), epoch)

    def make_informer(
        self, resource: Resource, *, max_objects: int, keep: Callable[[Object], Object] | None = None, labels: str = ""
    ) -> Informer:
        """An informer of a kind; `keep` prunes each object, `labels` selects."""
        return Informer(
            self.cluster,
            resource,
            rng=self.context.rng,
            monotonic_s=self.clock.monotonic_s,
            log=self.log,
            selection=InformerSelector(labels=labels),
            keep=keep,
            most=max_objects,
        )

    async def read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make an idempotent call, repeated with backoff; raises the ClusterError of the last attempt."""
        return await call_with_retries(
            call, rng=self.context.rng, is_idempotent=True, limits=self._limits, monotonic_s=self.clock.monotonic_s
        )

    async def write(
        self, call: Callable[[], Awaitable[T]], *, epoch: int | None = None, may_send: Callable[[], bool] | None = None
    ) -> T:
        """Make an idempotent write, a bounded number at once, and return the server's answer.

        It is repeated with backoff while the term of `epoch` lasts, or any where it is None; `may_send`, asked before
        each attempt, takes the place of that. Raises StaleTerm where that is over, else the ClusterError of the last
        attempt.
        """
        if may_send is None:
            may_send = (lambda: self.term() is not None) if epoch is None else (lambda: self.leads(epoch))

        async def attempt() -> T:
            if not may_send():
                raise StaleTerm
            return await call()

        async with self._write_slots:
            return await self.read(attempt)

    # The loop

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            try:
                await self._run_once()
            except Exception:  # the next run begins from lists
                self.failures += 1
                self.log.exception("%s=failed action=restart seconds=%g", self._name, RESTART_S)
            await asyncio.sleep(RESTART_S)
            self.reset()

    async def _run_once(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.events.run())
                group.create_task(self._reconcile_forever())
                if self.resync_s is not None:
                    group.create_task(self._resync_forever(self.resync_s))
                await self.start(group)
                self.is_started = True
        finally:
            self.is_started = False
            self.stop()
            await self.tasks.end()

    async def _resync_forever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.resync()

    async def _reconcile_forever(self) -> None:
        epoch: int | None = None
        while True:
            key = await self.queue.get()
            while not self.is_ready():
                epoch = None
                await asyncio.sleep(self.ready_poll_s)
            term = self.term()
            if term is not None and term.epoch != epoch:
                await self.begin_term(term.epoch)
                epoch = term.epoch
            await self._reconcile_once(key)
            # Keys that are due already would otherwise keep other tasks from running.
            await asyncio.sleep(0)

    async def _reconcile_once(self, key: KeyT) -> None:
        try:
            result = await self.reconcile(key)
        except ClusterError as error:
            self.failures += 1
            backoff = self._backoffs.get(key)
            if backoff is None:
                backoff = self._backoffs[key] = Backoff(
                    self.context.rng, first_s=_FIRST_RETRY_S, most_s=self.retry_most_s
                )
            wait_s = backoff.next_wait_s(retry_after_s(error))
            self.log.warning("%s=%s error=%s action=retry seconds=%.1f", self._name, key, error, wait_s)
            result = Result(wait_s)
        else:
            self._backoffs.pop(key, None)
        if self.rest_s:
            self.queue.rest(key, self.rest_s)
        if result is not None and result.requeue_after_s is not None:
            self.queue.add(key, result.requeue_after_s)


ROLE_LABEL = "eelgrid.io/role"
_LEADER = "leader"


class LeaderLabelReconciler(Reconciler[str]):
    """Keeps the label of this process's pod as its term is; the key is the pod's name.

    The label is removed where a term ends, and by the next leader from pods whose process could not do so any longer.
    """

    retry_most_s = 2.0  # agents reach the leader by this label

    def __init__(self, context: ClusterContext, *, name: str, namespace: str) -> None:
        super().__init__(context, "label")
        self._name, self._namespace = name, namespace
        self._leads = False
        context.elector.add_listener(self.on_term)

    def is_ready(self) -> bool:
        """Also while another leads: the label is to be removed then."""
        return True

    async def start(self, _: asyncio.TaskGroup) -> None:
        """A container that restarts in its pod may find the label of the process before it."""
        self.queue.add(self._name)

    def on_term(self, term: LeadershipTerm | None) -> None:
        """A term begins, or ends."""
        self._leads = term is not None
        self.queue.add(self._name)

    async def reconcile(self, key: str, /) -> Result | None:
        """Write the label or remove it; the leader removes it from all other pods, too."""
        leads = self._leads
        await self._write(key, _LEADER if leads else None)
        if leads:
            marked = await self.cluster.list(PODS, namespace=self._namespace, labels=f"{ROLE_LABEL}={_LEADER}")
            for pod in marked.items:
                name = pod["metadata"]["name"]
                if name != key:
                    await self._write(name, None)
        return None

    async def _write(self, name: str, value: str | None) -> None:
        body = {"metadata": {"labels": {ROLE_LABEL: value}}}
        try:
            await self.cluster.patch(PODS, name, body, namespace=self._namespace)
        except ObjectNotFound:
            # Outside of a pod, or one that was deleted since.
            self.log.debug("label=%s pod=%s written=no", ROLE_LABEL, name)
