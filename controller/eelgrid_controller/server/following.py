"""A controller that follows another one: what it answers, counts and logs until it leads.

Owns the refusal of every call with the address of who leads. Must not know how the journal is followed. A standby is live
and not ready: /livez answers, /readyz and grpc.health do not, and its metrics are its own only, so that a scrape of all
controllers has no number of the cluster twice.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.connection_limits import GuardedHandlers
from eelgrid_protos.controller_addresses import is_reachable_name
from eelgrid_protos.faults import NotLeader
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.rpc import AGENT_SERVICE, FLUX_SERVICE, OPERATOR_SERVICE, RpcService, build_handler

if TYPE_CHECKING:
    from eelgrid_controller.runtime.postgresql.journal import PostgresJournal
    from eelgrid_controller.runtime.postgresql.standby import JournalStandby

_LOOK_S = 0.5


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
    return AGENT_SERVICE, OPERATOR_SERVICE, *((FLUX_SERVICE,) if has_flux else ())


class _NoCalls:
    """Stands for the services that a standby does not have: no call gets as far as this."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._unreachable

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
        has_flux: bool,
        log: logging.Logger,
    ) -> None:
        self.refusals = 0
        self._server = server
        self._standby = standby
        self._front = front
        self._log = log
        self._has_ended = False
        self.handlers: tuple[grpc.GenericRpcHandler, ...] = tuple(
            build_handler(service, _NoCalls(), admit=self._refuse) for service in list_services(has_flux=has_flux)
        )

    def _refuse(self, _path: str, _context: Any) -> None:
        self.refusals += 1
        leader = self._standby.leader
        raise NotLeader(self._standby.describe_leader(), leader=leader if is_reachable_name(leader) else "")

    async def stop(self) -> None:
        """Stops serving, and following."""
        await self._server.stop(0.0)
        await asyncio.to_thread(self._standby.close)

    def families(self) -> Iterator[MetricFamily]:
        """What Prometheus reads of a standby."""
        yield build_family("eelgrid_following", float(not self._has_ended))
        yield build_family("eelgrid_following_refusals_total", self.refusals)
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
