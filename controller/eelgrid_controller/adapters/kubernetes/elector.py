"""The elector: takes part in an election over a Lease until it is stopped.

Owns requests, their time limits, and who is told. Must not know the rules (`election.py`),
nor what a leader does.

Whoever acts as leader asks `term` immediately before each write to the cluster: it looks
at the clock, so that a process that was paused does not act on a term that is over, and
its epoch goes into what is written. Give the elector a client of its own, whose requests
do not wait behind a burst of others.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from eelgrid_controller.adapters.kubernetes import election
from eelgrid_controller.adapters.kubernetes.election import Election, Record, Timing
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, Conflict, NotFound
from eelgrid_controller.adapters.kubernetes.port import Cluster, version_of
from eelgrid_controller.adapters.kubernetes.resources import LEASES
from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ConfigError
from eelgrid_controller.kubernetes.times import micro_time

__all__ = ["Elector", "Term", "is_of", "record_of"]

_TIMING = Timing()
_NANOSECONDS = 1_000_000_000


class Term(NamedTuple):
    """A time for which this controller leads; its epoch is larger than those of all terms before."""

    epoch: int
    until_s: float  # monotonic; later with each renewal
    is_continued: bool = False  # nobody else has led since our last term


def is_of(term: Term | None, epoch: int) -> bool:
    """Whether the term that runs, if one does, is that of an epoch: what was decided in another is not carried out."""
    return term is not None and term.epoch == epoch


class Elector:
    """One candidate for one Lease; `run` until `stop`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        log: logging.Logger,
        timing: Timing = _TIMING,
        floor: int = 0,
    ) -> None:
        """`identity` must be of this process alone (pod name and a random word); `floor` is the last known epoch."""
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._log = log
        self._state = Election(identity=identity, timing=timing, floor=floor, next_s=clock.monotonic_s())
        self._heard: list[Callable[[Term | None], None]] = []
        self._request: asyncio.Task[election.Event] | None = None
        self._stopping = asyncio.Event()

    @property
    def holder(self) -> str:
        """Who holds the Lease as far as is known; empty where nobody does."""
        return self._state.seen.holder if self._state.seen is not None else ""

    def term(self) -> Term | None:
        """The term that runs at this moment, None where this controller does not lead."""
        state = self._state
        if not state.is_leading or self._clock.monotonic_s() >= state.until_s:
            return None
        return Term(state.epoch, state.until_s, state.is_continued)

    def hear(self, callback: Callable[[Term | None], None]) -> None:
        """Tell the beginning and the end of terms to a callback, which must neither raise nor wait."""
        self._heard.append(callback)

    def stop(self) -> None:
        """Lead no more; `run` ends when the Lease is free, or cannot be set free."""
        self._stopping.set()

    async def run(self) -> None:
        """Take part until stopped. Cancelled, it leaves the Lease to run out."""
        stopping: asyncio.Task[Any] | None = asyncio.create_task(self._stopping.wait())
        try:
            self._take(election.Ticked())
            while not self._state.is_over:
                waiting = {task for task in (self._request, stopping) if task is not None}
                wait_s = max(0.0, self._state.wake_s - self._clock.monotonic_s())
                done, _ = await asyncio.wait(waiting, timeout=min(wait_s, 3600.0), return_when=asyncio.FIRST_COMPLETED)
                if self._request is not None and self._request in done:
                    request, self._request = self._request, None
                    self._take(request.result())
                elif stopping is not None and stopping in done:
                    stopping = None
                    self._take(election.Stop())
                else:
                    self._take(election.Ticked())
        finally:
            if stopping is not None:
                stopping.cancel()
            if self._request is not None:
                self._request.cancel()
            if self._state.is_leading:
                self._state = replace(self._state, is_leading=False)
                self._tell(None)

    def _take(self, event: election.Event) -> None:
        """One event: the next state, and what it asks for."""
        self._state, told = election.step(self._state, event, self._clock.monotonic_s())
        for one in told:
            match one:
                case election.Lead(epoch, until_s, is_continued):
                    self._tell(Term(epoch, until_s, is_continued))
                case election.StepDown(why):
                    self._log.warning("lease=%s/%s led=no reason=%s", self._namespace, self._name, why)
                    self._tell(None)
                case election.Read() | election.Write():
                    self._request = asyncio.create_task(self._asked(one))

    def _tell(self, term: Term | None) -> None:
        for callback in self._heard:
            callback(term)

    async def _asked(self, asked: election.Read | election.Write) -> election.Event:
        """Carry out a request; whatever comes of it is an event."""
        sent_s = self._clock.monotonic_s()
        is_write = isinstance(asked, election.Write)
        try:
            async with asyncio.timeout(self._state.timing.request_s):
                if isinstance(asked, election.Write):
                    found = await self._write(asked)
                else:
                    found = await self._cluster.get(LEASES, self._name, namespace=self._namespace)
        except NotFound:
            return election.Answered(sent_s, None, is_written=False)
        except Conflict:
            return election.Refused()
        except (ClusterError, ConfigError, TimeoutError) as error:
            self._log.warning("lease=%s/%s written=%s error=%s", self._namespace, self._name, is_write, error)
            return election.Failed()
        return election.Answered(sent_s, record_of(found), is_written=is_write)

    async def _write(self, write: election.Write) -> dict[str, Any]:
        record, now = write.record, micro_time(self._clock.now_ns())
        spec: dict[str, Any] = {
            "holderIdentity": record.holder or None,
            "leaseDurationSeconds": max(1, round(self._state.timing.lease_s)) if record.holder else 1,
            "leaseTransitions": record.epoch,
            "renewTime": now,
        }
        if write.is_new_term:
            spec["acquireTime"] = now
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if not write.against:
            return await self._cluster.create(LEASES, {"metadata": metadata, "spec": spec})
        body = {"metadata": {"resourceVersion": write.against}, "spec": spec}
        return await self._cluster.patch(LEASES, self._name, body, namespace=self._namespace)


def record_of(lease: Mapping[str, Any]) -> Record:
    """What a Lease object says."""
    spec = lease.get("spec") or {}
    return Record(str(spec.get("holderIdentity") or ""), int(spec.get("leaseTransitions") or 0), version_of(lease))
