"""A desk of the energy ledger that runs, windows to give it, and a clock that a test moves."""

import asyncio
import logging
from types import SimpleNamespace

from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import parse_query
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    Inventory,
    OwnerKind,
    ResourceRequest,
    WindowDevice,
    WindowShare,
    WorkloadSpec,
)
from tests.waiting import wait_until

SECOND_NS = 10**9
BEGIN_NS = 1_799_971_200 * SECOND_NS  # a midnight
CLOCK = Clock(now_ns=lambda: BEGIN_NS + 1800 * SECOND_NS)
SPEC = WorkloadSpec(
    name="chat",
    request=ResourceRequest(gpu_count=1, gpu_milli=1000),
    queue="q1",
    namespace="ml",
    user="ann",
    labels={"team": "a"},
)
OWNERS = (
    EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-1"),
    EnergyOwner(kind=OwnerKind.UNALLOCATED),
    EnergyOwner(kind=OwnerKind.SLURM, job="7"),
)


def inventory(name):
    return Inventory(node_name=name, cpu_milli=1, memory_bytes=1, pool="train")


def window(number, energy_mj=1_000, *, incarnation=1, owner=0):
    share = WindowShare(
        device=0,
        owner=owner,
        part=EnergyPart.ACTIVE,
        method=AttributionMethod.EXCLUSIVE,
        confidence=AttributionConfidence.HIGH,
        energy_mj=energy_mj,
    )
    return EnergyWindow(
        incarnation=incarnation,
        number=number,
        begin_ns=BEGIN_NS + (number - 1) * 60 * SECOND_NS,
        end_ns=BEGIN_NS + number * 60 * SECOND_NS,
        devices=(WindowDevice(gpu_uuid="g", total_mj=energy_mj),),
        owners=OWNERS,
        shares=(share,),
    )


class Site:
    """A desk that runs, of a core that knows some workloads."""

    def __init__(self, folder, workloads=None, clock=None):
        known = {"w-1": SimpleNamespace(spec=SPEC)} if workloads is None else workloads
        core = SimpleNamespace(state=SimpleNamespace(workloads=known, policy=SimpleNamespace(prices=None)))
        self.desk = LedgerWriter(
            folder, core=lambda: core, clock=clock or CLOCK, log=logging.getLogger("test"), bytes_most=10**9
        )
        self.acknowledged = []
        self.refused = []  # node, windows and why, of acknowledgements that say so

    async def __aenter__(self):
        self.task = asyncio.create_task(self.desk.run())
        await self.until(lambda: self.desk._store is not None or self.desk.failures)
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def until(self, is_so):
        await wait_until(is_so)

    def take(self, one, node="n1"):
        self.desk.add_window(inventory(node), one, lambda told: self.hear(node, told))

    def hear(self, node, told):
        self.acknowledged.append((node, told.number))
        if told.refused:
            self.refused.append((node, told.refused, told.refused_reason))

    async def total(self, *group_by):
        asked = parse_query(
            begin_ns=BEGIN_NS, end_ns=BEGIN_NS + 86_400 * SECOND_NS, group_by=group_by, filters={}, rows_most=100
        )
        (answer,) = await self.desk.query((asked,))
        return answer
