"""Taking over work that stands already: given places, checked against the ledger, as events.

Owns the check, which devices are meant, and the order of the events. Must not know who found
the work, nor apply anything: core.py does.

Theory. Work that an engine runs and that this journal does not know is among what others hold.
To take it over is to hold its places in its own name and to subtract what it counted for
there, in one step: in between, its room would look free. A node that takes nothing new keeps
what stands on it, and which devices others hold is a guess from their number; so neither is
asked while places are held, and both are told again at the end of the step. What is left must
be enough for all others. Where devices are counts in disguise any free one is as good as
another; elsewhere it is the device that was named, or nothing is taken over at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.events import Event, NodeOccupied, WorkloadPlaced, WorkloadSubmitted
from eelgrid_controller.ledger import ContradictoryEvent, NodeRecord, assignment_of
from eelgrid_controller.occupancy import NOBODY, Others
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import Gpu, NodeState, Placement, Workload, WorkloadPhase, WorkloadSpec

__all__ = ["AdoptionRefused", "Standing", "adoption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One replica where it stands; replicas count from 0. `counted` is what it is among others' amounts there."""

    node_name: str
    gpu_indexes: tuple[int, ...] = ()
    is_exact: bool = False  # these devices and no others
    counted: Others = NOBODY


class AdoptionRefused(FailedPrecondition):
    """A place that cannot be held; `replica` stands there."""

    def __init__(self, workload_id: str, replica: int, problem: str) -> None:
        self.replica = replica
        super().__init__(
            f"replica {replica} of {workload_id} cannot be taken over: {problem}; nothing was taken over, it stays "
            "counted as what others hold"
        )


def adoption(
    state: ClusterState, workload_id: str, spec: WorkloadSpec, standing: Sequence[Standing], *, now_ns: int
) -> tuple[Event, ...]:
    """The events by which a new workload stands at these places; raises AdoptionRefused, and changes nothing."""
    if len(standing) != spec.replicas:
        raise AdoptionRefused(workload_id, len(standing), f"{spec.replicas} replicas have {len(standing)} places")
    workload = Workload(workload_id=workload_id, spec=spec, phase=WorkloadPhase.PLACED, submitted_ns=now_ns)
    ledgers: dict[str, NodeRecord] = {}
    left: dict[str, Others] = {}
    placements = []
    for replica, one in enumerate(standing):
        name = one.node_name
        if name not in ledgers:
            record = state.nodes.get(name)
            if record is None or record.state is not NodeState.READY:
                raise AdoptionRefused(workload_id, replica, f"node {name} is not there")
            ledgers[name] = replace(record.copy(), others=NOBODY)
            left[name] = record.others
        placement = _placed(workload, replica, one, ledgers[name])
        placements.append(placement)
        left[name] = _less(left[name], one.counted)
    for name, record in ledgers.items():
        if problem := _lack(record, left[name]):
            replica = next(number for number, one in enumerate(standing) if one.node_name == name)
            raise AdoptionRefused(workload_id, replica, f"node {name} {problem}")
    return (
        *(NodeOccupied(time_ns=now_ns, node_name=name, others=NOBODY) for name in left),
        WorkloadSubmitted(time_ns=now_ns, workload_id=workload_id, spec=spec),
        WorkloadPlaced(time_ns=now_ns, workload_id=workload_id, placements=tuple(placements)),
        *(NodeOccupied(time_ns=now_ns, node_name=name, others=others) for name, others in left.items()),
    )


def _placed(workload: Workload, replica: int, one: Standing, record: NodeRecord) -> Placement:
    """Holds the place on a copy of its node's ledger."""
    gpus = _devices(workload, replica, one, record)
    placement = Placement(
        replica=replica,
        node_name=one.node_name,
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
        gpu_indexes=tuple(gpu.index for gpu in gpus),
    )
    try:
        record.hold(assignment_of(workload, placement))
    except ContradictoryEvent as error:
        raise AdoptionRefused(workload.workload_id, replica, str(error).partition(": ")[2]) from None
    return placement


def _devices(workload: Workload, replica: int, one: Standing, record: NodeRecord) -> list[Gpu]:
    """The devices that are meant, or others that are free where those are but counts."""
    count = workload.spec.request.gpu_count
    free = {gpu.index: gpu for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index) if _is_free(record, gpu)}
    meant = [free.pop(index) for index in dict.fromkeys(one.gpu_indexes) if index in free][:count]
    if len(meant) < count and not one.is_exact:
        meant += list(free.values())[: count - len(meant)]
    if len(meant) < count:
        text = f"devices {', '.join(map(str, one.gpu_indexes))} of" if one.is_exact else f"{count} devices of"
        raise AdoptionRefused(workload.workload_id, replica, f"{text} node {one.node_name} are not free, or not there")
    return sorted(meant, key=lambda gpu: gpu.index)


def _is_free(record: NodeRecord, gpu: Gpu) -> bool:
    is_there = not (gpu.lost or gpu.uuid in record.lost_gpus or gpu.cordon or gpu.mig_enabled)
    return is_there and gpu.uuid not in record.gpu_milli and not record.keeps(gpu)


def _less(others: Others, counted: Others) -> Others:
    return replace(
        others,
        cpu_milli=max(0, others.cpu_milli - counted.cpu_milli),
        memory_bytes=max(0, others.memory_bytes - counted.memory_bytes),
        gpu_count=max(0, others.gpu_count - counted.gpu_count),
    )


def _lack(record: NodeRecord, others: Others) -> str:
    """What the node would lack for all others beside what is held now."""
    unheld = sum(gpu.uuid not in record.gpu_milli for gpu in record.inventory.gpus)
    if unheld < others.gpu_count:
        return f"has {unheld} GPUs left, and others hold {others.gpu_count}"
    if record.cpu_left_milli < others.cpu_milli:
        return "has too little CPU beside what others hold"
    if record.memory_left_bytes < others.memory_bytes:
        return "has too little memory beside what others hold"
    return ""
