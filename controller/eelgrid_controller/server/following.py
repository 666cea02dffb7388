"""A controller that follows another one: what it answers, counts and logs until it leads.

Owns the refusal of calls with the address of who leads, and the answers to reads whose callers allow stale ones: those are
computed on a copy of the state that was followed, and say how old it is. Nothing that only a leader has is in them: no
readings of agents, no decisions. Must not know how the journal is followed. A standby is live and not ready: /livez answers, /readyz and grpc.health do not, and its metrics are its own only, so that a scrape of all
controllers has no number of the cluster twice.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from eelgrid_controller.clock import Clock, RecentLatencies
from eelgrid_controller.core.core import Core
from eelgrid_controller.server.grpc.authorization import CallerService
from eelgrid_controller.server.grpc.resource_reads import ReadService
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.connection_limits import GuardedHandlers
from eelgrid_protos.controller_addresses import is_reachable_name
from eelgrid_protos.faults import NotLeader
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.rpc import (
    AGENT_SERVICE,
    FLUX_SERVICE,
    INGEST_SERVICE,
    OPERATOR_SERVICE,
    Admit,
    RpcService,
    build_handler,
)
from eelgrid_protos.stale_reads import Staleness, allows_stale

if TYPE_CHECKING:
    from eelgrid_controller.runtime.postgresql.journal import PostgresJournal
    from eelgrid_controller.runtime.postgresql.standby import FollowedState, JournalStandby

_LOOK_S = 0.5
# How long reads have the same copy of the state, at least; and how many times as long as making it took, so that reads take
# a bounded part of a processor in a cluster of any size.
_KEPT_S = 0.25
_KEPT_TIMES = 4.0
_READABLE = {
    OPERATOR_SERVICE.path(method): method.attribute for method in OPERATOR_SERVICE.methods if method.may_be_stale
}

_Result = TypeVar("_Result")


def name_address(listen: str, port: int) -> str:
    """Returns by which address others call a controller that listens on this one; one that stands for all is the host's."""
    if listen.startswith("unix:"):
        return listen
    host = listen.rpartition(":")[0]
    return f"{host if is_reachable_name(f'{host}:{port}') else socket.gethostname()}:{port}"


def replace_port(listen: str, port: int) -> str:
    """Returns an address to listen on with the port that was given for it; a socket's path has none."""
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def list_services(*, has_flux: bool) -> tuple[RpcService, ...]:
    """Returns the services of a controller."""
    return AGENT_SERVICE, INGEST_SERVICE, OPERATOR_SERVICE, *((FLUX_SERVICE,) if has_flux else ())


class _Copy:
    """A copy of the state, and the reads of it, one at a time."""

    def __init__(self, followed: "FollowedState", callers: CallerService, catalogue: Catalogue, clock: Clock) -> None:
        self.followed = followed
        self._core = Core(followed.state, catalogue)
        self._turn = asyncio.Lock()
        views = ResourceViews(
            telemetry=Telemetry(), decisions=RecentLatencies(1), now_ns=clock.now_ns, monotonic_s=clock.monotonic_s
        )
        self.reads = ReadService(self._read, views, callers.view_for)

    async def _read(self, view: Callable[[Core], _Result], /) -> _Result:
        async with self._turn:
            return await asyncio.to_thread(view, self._core)

    @property
    def staleness(self) -> Staleness:
        """How stale an answer is that is sent now."""
        leader = self.followed.leader
        return Staleness(
            age_s=self.followed.age_s,
            revision=self.followed.state.revision,
            timeline=leader.timeline,
            epoch=leader.epoch,
        )


class StaleReads:
    """Answers the calls that a follower may answer; `callers` says who calls."""

    def __init__(
        self, standby: "JournalStandby", callers: CallerService, *, catalogue: Catalogue, clock: Clock
    ) -> None:
        self.answers = 0
        self._standby = standby
        self._callers = callers
        self._catalogue = catalogue
        self._clock = clock
        self._copying = asyncio.Lock()
        self._copy: _Copy | None = None
        self._kept_until_s = 0.0

    async def serve(self, name: str, request: object, context: Any) -> Any:
        """Answers a call by its name in Python; None where nothing was followed yet. Raises Fault."""
        copy = await self._current()
        if copy is None:
            return None
        answer = await getattr(self._callers if name == "who_am_i" else copy.reads, name)(request, context)
        context.set_trailing_metadata(copy.staleness.to_metadata())
        self.answers += 1
        return answer

    async def _current(self) -> _Copy | None:
        """Returns the copy that is read now: at most so old, or a new one."""
        async with self._copying:
            if self._copy is None or time.perf_counter() >= self._kept_until_s:
                began_s = time.perf_counter()
                self._copy = await asyncio.to_thread(self._make_copy)
                ended_s = time.perf_counter()
                self._kept_until_s = ended_s + max(_KEPT_S, _KEPT_TIMES * (ended_s - began_s))
            return self._copy

    def _make_copy(self) -> _Copy | None:
        last = self._copy
        followed = self._standby.copy_state(None if last is None else last.followed)
        if last is not None and followed is not None and followed.state is last.followed.state:
            last.followed = followed
            return last
        return None if followed is None else _Copy(followed, self._callers, self._catalogue, self._clock)


class _Calls:
    """Stands for the services that a standby has: of those that may be stale, the call; no other gets as far as this."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self._serve = serve

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._serve, name) if name in _READABLE.values() else self._unreachable

    def _unreachable(self, *_: object) -> Any:
        raise AssertionError("a standby refuses a call before it is read")


class StandbyServer:
    """One controller's time as a standby."""

    def __init__(
        self,
        standby: "JournalStandby",
        server: grpc.aio.Server,
        *,
        front: GuardedHandlers,
        reads: StaleReads,
        admit: Admit,
        has_flux: bool,
        log: logging.Logger,
    ) -> None:
        """`admit` may refuse a call that `reads` would answer, as the leader's own would."""
        self.refusals = 0
        self._reads = reads
        self._authorize = admit
        self._server = server
        self._standby = standby
        self._front = front
        self._log = log
        self._has_ended = False
        self.handlers: tuple[grpc.GenericRpcHandler, ...] = tuple(
            build_handler(service, _Calls(self._serve), admit=self._admit)
            for service in list_services(has_flux=has_flux)
        )

    def _admit(self, path: str, context: Any) -> None:
        """Admits a read that may be stale; raises NotLeader for any other call, and RoleRefused."""
        if path not in _READABLE or self._has_ended or not allows_stale(context.invocation_metadata()):
            raise self._refusal()
        self._authorize(path, context)

    async def _serve(self, name: str, request: object, context: Any) -> Any:
        answer = await self._reads.serve(name, request, context)
        if answer is None:
            raise self._refusal()
        return answer

    def _refusal(self) -> NotLeader:
        self.refusals += 1
        leader = self._standby.leader
        return NotLeader(self._standby.describe_leader(), leader=leader if is_reachable_name(leader) else "")

    async def stop(self) -> None:
        """Stops following, and serving while nothing else was served."""
        if not self._has_ended:
            await self._server.stop(0.0)
        await asyncio.to_thread(self._standby.close)

    def families(self) -> Iterator[MetricFamily]:
        """What Prometheus reads of a standby."""
        yield build_family("eelgrid_following", float(not self._has_ended))
        yield build_family("eelgrid_following_refusals_total", self.refusals)
        yield build_family("eelgrid_following_reads_total", self._reads.answers)
        yield build_family("eelgrid_following_rebuilds_total", self._standby.rebuilds)
        if self._has_ended:
            return
        yield build_family("eelgrid_following_revision", self._standby.applied_seq)
        age_s = self._standby.age_s
        if age_s is not None:
            yield build_family("eelgrid_following_age_seconds", age_s)

    async def wait_to_lead(self, address: str) -> "PostgresJournal":
        """Returns the journal as soon as this process leads it by that address. Raises ControllerError."""
        self._front.replace_handlers((), self.handlers)
        await self._server.start()
        leading = asyncio.create_task(asyncio.to_thread(self._standby.lead, address))
        told: tuple[str, str] | None = None
        while True:
            await asyncio.wait((leading,), timeout=_LOOK_S)
            if leading.done():
                break
            now = self._standby.describe_leader(), self._standby.fault
            if now != told:
                told = now
                self._log.info("event=following leader=%r fault=%r", *now)
        journal = await leading
        # Nobody ends it but the owner of this process, which does not wait here then.
        assert journal is not None
        self._has_ended = True
        self._log.warning("event=leading term=%s entries_followed=%d", journal.term, self._standby.applied_seq)
        return journal
