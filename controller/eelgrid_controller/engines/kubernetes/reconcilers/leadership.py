"""Leadership: the elector, a candidate for the Lease, and the label by which a Service reaches the pod that leads.

The label is removed where a term ends, and by the next leader from pods whose process could not do so any longer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api import election
from eelgrid_controller.engines.kubernetes.api.election import Election, LeadershipTerm, LeaseRecord, Timing
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, Conflict, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import LEASES, PODS, ClusterClient, version_of
from eelgrid_controller.engines.kubernetes.model.quantities import format_micro_time
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ClusterContext, Reconciler, Result
from eelgrid_controller.errors import ControllerConfigError

_TIMING = Timing()
_NANOSECONDS = 1_000_000_000


class Elector:
    """A candidate for one Lease; `run` until `stop`."""

    def __init__(
        self,
        cluster: ClusterClient,
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
        self._heard: list[Callable[[LeadershipTerm | None], None]] = []
        self._request: asyncio.Task[election.ElectionEvent] | None = None
        self._stopping = asyncio.Event()

    @property
    def holder(self) -> str:
        """The last known holder of the Lease; empty without one."""
        return self._state.seen.holder if self._state.seen is not None else ""

    def term(self) -> LeadershipTerm | None:
        """The term that runs at this moment, None where this controller does not lead."""
        state = self._state
        if not state.is_leading or self._clock.monotonic_s() >= state.until_s:
            return None
        return LeadershipTerm(state.epoch, state.until_s, state.is_continued)

    def add_listener(self, callback: Callable[[LeadershipTerm | None], None]) -> None:
        """Tell the beginning and the end of terms to a callback, which must neither raise nor wait."""
        self._heard.append(callback)

    def stop(self) -> None:
        """Lead no more; `run` ends when the Lease is free, or cannot be set free."""
        self._stopping.set()

    async def run(self) -> None:
        """Take part until stopped. Cancelled, it leaves the Lease to run out."""
        stopping: asyncio.Task[Any] | None = asyncio.create_task(self._stopping.wait())
        try:
            self._apply_action(election.ElectionTick())
            while not self._state.is_over:
                waiting = {task for task in (self._request, stopping) if task is not None}
                wait_s = max(0.0, self._state.wake_s - self._clock.monotonic_s())
                done, _ = await asyncio.wait(waiting, timeout=min(wait_s, 3600.0), return_when=asyncio.FIRST_COMPLETED)
                if self._request is not None and self._request in done:
                    request, self._request = self._request, None
                    self._apply_action(request.result())
                elif stopping is not None and stopping in done:
                    stopping = None
                    self._apply_action(election.StopElection())
                else:
                    self._apply_action(election.ElectionTick())
        finally:
            if stopping is not None:
                stopping.cancel()
            if self._request is not None:
                self._request.cancel()
            if self._state.is_leading:
                self._state = replace(self._state, is_leading=False)
                self._notify_listeners(None)

    def _apply_action(self, event: election.ElectionEvent) -> None:
        """Apply an event to the election, and carry out its actions."""
        self._state, told = election.step_election(self._state, event, self._clock.monotonic_s())
        for one in told:
            match one:
                case election.StartLeading(epoch, until_s, is_continued):
                    self._notify_listeners(LeadershipTerm(epoch, until_s, is_continued))
                case election.StopLeading(why):
                    self._log.warning("lease=%s/%s leading=no reason=%s", self._namespace, self._name, why)
                    self._notify_listeners(None)
                case election.ReadLease() | election.WriteLease():
                    self._request = asyncio.create_task(self._execute_request(one))

    def _notify_listeners(self, term: LeadershipTerm | None) -> None:
        for callback in self._heard:
            callback(term)

    async def _execute_request(self, asked: election.ReadLease | election.WriteLease) -> election.ElectionEvent:
        """Carry out a request; whatever comes of it is an event."""
        sent_s = self._clock.monotonic_s()
        is_write = isinstance(asked, election.WriteLease)
        try:
            async with asyncio.timeout(self._state.timing.request_s):
                if isinstance(asked, election.WriteLease):
                    found = await self._write(asked)
                else:
                    found = await self._cluster.get(LEASES, self._name, namespace=self._namespace)
        except ObjectNotFound:
            return election.LeaseAnswered(sent_s, None, is_written=False)
        except Conflict:
            return election.LeaseConflict()
        except (ClusterError, ControllerConfigError, TimeoutError) as error:
            self._log.warning("lease=%s/%s written=%s error=%s", self._namespace, self._name, is_write, error)
            return election.LeaseRequestFailed()
        return election.LeaseAnswered(sent_s, record_of(found), is_written=is_write)

    async def _write(self, write: election.WriteLease) -> dict[str, Any]:
        record, now = write.record, format_micro_time(self._clock.now_ns())
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


def record_of(lease: Mapping[str, Any]) -> LeaseRecord:
    """Parse a Lease object."""
    spec = lease.get("spec") or {}
    return LeaseRecord(str(spec.get("holderIdentity") or ""), int(spec.get("leaseTransitions") or 0), version_of(lease))


ROLE_LABEL = "eelgrid.io/role"
_LEADER = "leader"


class LeaderLabelReconciler(Reconciler[str]):
    """Keeps the label of this process's pod as its term is; the key is the pod's name."""

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
