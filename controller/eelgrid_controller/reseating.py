"""Seating replicas of running work anew: those that run already gain their places, those that are no more lose theirs.

Owns the check and the order of the events. Must not know which engine that is, nor choose a
node: apply is core.py's.

Theory. Where replicas run before the core knows of them (another leader began them, or they
were counted as what others hold) they are not placed again but taken over: at their node, on
GPUs that are free there, those that are named before any other. What others hold on these
nodes becomes less in the same step, so that no moment exists in which somebody else gets the
room, or in which it is held twice. Replicas that are no more are released by their numbers
in that step, too. What stands nowhere that has room for it is left out; so is what stands on
a node that is lost. A node that is closed takes over what runs there, and stays closed.
Everything is tried on copies first: a step that cannot be changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_controller.admission import known, refuse_nonsense
from eelgrid_controller.events import Event, NodeOccupied, WorkloadPlaced, WorkloadScaled, WorkloadSubmitted
from eelgrid_controller.ledger import ContradictoryEvent, NodeRecord, assignment_of
from eelgrid_controller.occupancy import Others
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import Placement, SubmitWorkloadRequest, Workload, WorkloadPhase

__all__ = ["Reseating", "Stand", "reseated"]


class Stand(NamedTuple):
    """Where a replica runs; the GPUs by index, as far as somebody said so."""

    node_name: str
    gpu_indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reseating:
    """What runs where, what others hold there beside it, and which replicas are no more."""

    stands: tuple[Stand, ...] = ()
    others: Mapping[str, Others] = field(default_factory=dict)  # by node
    released: tuple[int, ...] = ()


def reseated(
    state: ClusterState, request: SubmitWorkloadRequest, reseating: Reseating, *, now_ns: int
) -> tuple[Event, ...]:
    """The events, none where nothing is to be done.

    Raises FailedPrecondition where nothing of it can be, AlreadyExists where another workload has the id.
    """
    key = request.workload_id
    before = state.workloads.get(key)
    if before is None or before.phase is not WorkloadPhase.PLACED:
        if known(state, request) is not None:
            return ()
        refuse_nonsense(request.spec)
        workload = Workload(workload_id=key, spec=request.spec, phase=WorkloadPhase.PENDING, submitted_ns=now_ns)
    else:
        workload = before
    there = {item.replica: item for item in workload.placements}
    gone = [there[replica] for replica in dict.fromkeys(reseating.released) if replica in there]
    trial = _Trial(state, reseating.others, [*gone, *reseating.stands])
    for placement in gone:
        trial.records[placement.node_name].release(key, placement.replica)
    first = 1 + max(there, default=-1)
    new: list[Placement] = []
    for stand in reseating.stands:
        taken = trial.take(workload, first + len(new), stand)
        if taken is not None:
            new.append(taken)
    left = len(there) - len(gone) + len(new)
    if left < 1:
        raise FailedPrecondition(f"workload {key} would stand nowhere; cancel it, or wait until its nodes have room")
    if not gone and not new:
        return ()
    if before is workload:
        scaled = WorkloadScaled(
            time_ns=now_ns,
            workload_id=key,
            released=tuple(sorted(item.replica for item in gone)),
            placements=tuple(new),
        )
        return trial.around((scaled,), now_ns)
    begun = WorkloadSubmitted(time_ns=now_ns, workload_id=key, spec=replace(request.spec, replicas=len(new)))
    return trial.around((begun, WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=tuple(new))), now_ns)


class _Trial:
    """Copies of the ledgers that are involved, open, with what others will hold there."""

    def __init__(
        self, state: ClusterState, others: Mapping[str, Others], involved: Sequence[Placement | Stand]
    ) -> None:
        self.records: dict[str, NodeRecord] = {}
        self._before: dict[str, Others] = {}
        self._after: dict[str, Others] = {}
        for name in dict.fromkeys([*others, *(item.node_name for item in involved)]):
            if name in state.nodes:
                record = self.records[name] = state.nodes[name].copy()
                self._before[name] = record.others
                self._after[name] = others.get(name, record.others)
                record.others = replace(self._after[name], closed="")

    def take(self, workload: Workload, replica: int, stand: Stand) -> Placement | None:
        """The place of what runs on a node; None where its ledger has no room for it."""
        record = self.records.get(stand.node_name)
        gpus = None if record is None else _free(record, workload.spec.request.gpu_count, stand.gpu_indexes)
        if record is None or gpus is None:
            return None
        indexes = {gpu.uuid: gpu.index for gpu in record.inventory.gpus}
        placement = Placement(
            replica=replica,
            node_name=stand.node_name,
            gpu_uuids=gpus,
            gpu_indexes=tuple(indexes[uuid] for uuid in gpus),
        )
        try:
            record.hold(assignment_of(workload, placement))
        except ContradictoryEvent:
            return None
        return placement

    def around(self, events: tuple[Event, ...], now_ns: int) -> tuple[Event, ...]:
        """The events, between what others hold while they happen and afterwards."""
        opened = {name: replace(found, closed="") for name, found in self._after.items()}
        first = [
            NodeOccupied(time_ns=now_ns, node_name=name, others=found)
            for name, found in opened.items()
            if found != self._before[name]
        ]
        last = [
            NodeOccupied(time_ns=now_ns, node_name=name, others=found)
            for name, found in self._after.items()
            if found != opened[name]
        ]
        return (*first, *events, *last)


def _free(record: NodeRecord, count: int, wanted: tuple[int, ...]) -> tuple[str, ...] | None:
    """So many GPUs that nobody holds, those that are named first; None where there are too few."""
    taken = record.taken_by_others()
    free = [
        gpu
        for gpu in record.inventory.gpus
        if gpu.uuid not in record.gpu_milli
        and gpu.uuid not in taken
        and gpu.uuid not in record.lost_gpus
        and not (gpu.cordon or gpu.mig_enabled or record.keeps(gpu))
    ]
    free.sort(key=lambda gpu: (gpu.index not in wanted, gpu.index))
    chosen = sorted(free[:count], key=lambda gpu: gpu.index)
    return tuple(gpu.uuid for gpu in chosen) if len(chosen) == count else None
