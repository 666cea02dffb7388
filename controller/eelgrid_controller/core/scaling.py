"""Scaling: which replicas of a running workload to remove, and where to place new ones.

Owns the choice of the replicas to remove, and the event. Must not know why a number is wanted, and applies nothing:
the core does.

Theory: a replica counts if its node is ready and none of its GPUs is lost. New replicas are placed like those of a
new workload, as many as fit. Of those that count, the ones are removed that save the most modelled watts, one after
another on a copy; of equals the youngest. The first replica of a training job stays, since the others rendezvous
there. Replicas on lost nodes may still run and come back: they are released once enough others run, or where they
would exceed the objective's maximum, so that a node that returns is told to stop them.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadScaled
from eelgrid_controller.state.node_allocations import NodeRecord, is_sliced
from eelgrid_kernels.arrays import Task
from eelgrid_kernels.node_cost import node_power
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import Placement, ReplicaExplanation, Workload, WorkloadKind, WorkloadPhase, WorkloadSpec

# The bound of quantities.Count: a workload that is scaled up and down for a long time exhausts its numbers.
_NUMBER_MOST = 1_000_000
DecideReplicas = Callable[[WorkloadSpec], PlacementDecision]


def list_healthy_replicas(state: ClusterState, workload: Workload) -> tuple[Placement, ...]:
    """Returns the replicas that can serve: their nodes are ready and their GPUs are not lost."""
    return tuple(
        placement for placement in workload.placements if _is_healthy(state.nodes[placement.node_name], placement)
    )


def _is_healthy(record: NodeRecord, placement: Placement) -> bool:
    there = {gpu.uuid for gpu in record.inventory.gpus} - record.lost_gpus
    return record.is_ready and there.issuperset(placement.gpu_uuids)


class _Row:
    """The replicas on one node by the GPUs held: those of one kind save alike, the youngest is removed first."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.kinds: dict[tuple[int, ...], list[Placement]] = {}
        # Rises with each change, so that savings computed before it are known to be stale.
        self.era = 0


def _dearest(snapshot: Snapshot, workload: Workload, among: Sequence[Placement], count: int) -> list[Placement]:
    """Selects `count` replicas, each of them the one that saves the most modelled watts after the previous ones.

    What a replica saves depends on its own node alone, so only that node's savings are computed again after a
    removal.
    """
    trial, request = snapshot.copy(), workload.spec.request
    task = Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)
    wanted = {placement.node_name for placement in among}
    rows = {name: _Row(row) for row, name in enumerate(snapshot.names) if name in wanted}
    slots_of = {
        name: {uuid: slot for slot, uuid in enumerate(snapshot.devices[at.row].uuids)} for name, at in rows.items()
    }
    for placement in sorted(among, key=lambda item: item.replica):
        slots = tuple(slots_of[placement.node_name][uuid] for uuid in placement.gpu_uuids)
        rows[placement.node_name].kinds.setdefault(slots, []).append(placement)

    def saved_w(row: int, slots: tuple[int, ...]) -> float:
        before_w = float(node_power(trial.snapshot.nodes, row))
        trial.remove_task(row, slots, task)
        after_w = float(node_power(trial.snapshot.nodes, row))
        trial.place_task(row, slots, task)
        return before_w - after_w

    best: list[tuple[float, int, str, int, tuple[int, ...]]] = []

    def weigh(name: str) -> None:
        at = rows[name]
        for slots, there in at.kinds.items():
            if there:
                heapq.heappush(best, (-saved_w(at.row, slots), -there[-1].replica, name, at.era, slots))

    for name in rows:
        weigh(name)
    gone = list[Placement]()
    while len(gone) < count:
        _, _, name, era, slots = heapq.heappop(best)
        at = rows[name]
        if era != at.era:
            continue
        gone.append(at.kinds[slots].pop())
        trial.remove_task(at.row, slots, task)
        at.era += 1
        weigh(name)
    return gone


def _bounds(spec: WorkloadSpec) -> tuple[int, int]:
    """Returns the minimum and maximum number of replicas of the workload's objective."""
    if spec.service is not None:
        return spec.service.replicas_least, spec.service.replicas_most
    if spec.training is not None:
        # A gang that is not elastic keeps the size that it was submitted with.
        return spec.training.replicas_least or spec.replicas, spec.training.replicas_most or spec.replicas
    return 1, 10_000


def _numbers(workload: Workload, count: int) -> list[int]:
    """Returns numbers of new replicas: the next ones, or the lowest unused if a plan cannot express these."""
    used = {item.replica for item in workload.placements}
    first = 1 + max(used)
    if first + count <= _NUMBER_MOST:
        return list(range(first, first + count))
    return list(itertools.islice((number for number in range(_NUMBER_MOST) if number not in used), count))


def plan_scaling(
    state: ClusterState, snapshot: Snapshot, workload: Workload, replicas: int, decide: DecideReplicas, *, now_ns: int
) -> WorkloadScaled | None:
    """Returns the event that scales a workload to `replicas`, or as close as capacity allows; None if nothing changes.

    Raises FailedPrecondition for a workload that does not run, InvalidArgument for a number outside its objective.
    """
    if workload.phase is not WorkloadPhase.PLACED:
        raise FailedPrecondition(
            f"workload {workload.workload_id} does not run; wait until it is placed, or submit it with more replicas"
        )
    if is_sliced(workload):
        raise FailedPrecondition(
            f"workload {workload.workload_id} is served by slices, which the partition planner counts; make a plan: "
            "eelctl partition plan"
        )
    least, most = _bounds(workload.spec)
    if not least <= replicas <= most:
        bounds = f"{least} to {most}"
        raise InvalidArgument(
            "the workload was promised otherwise",
            (Violation("replicas", f"is {replicas}, outside of {bounds}", "ask for a number within"),),
        )
    stand = list_healthy_replicas(state, workload)
    alive = {item.replica for item in stand}
    fallen = [item for item in workload.placements if item.replica not in alive]
    gone, new = list[Placement](), tuple[Placement, ...]()
    explanation = tuple[ReplicaExplanation, ...]()
    if len(stand) < replicas:
        wanted = replace(workload.spec, replicas=replicas - len(stand))
        decision = decide(wanted)
        if not decision.placements and decision.room:
            decision = decide(replace(wanted, replicas=decision.room))
        numbers = _numbers(workload, len(decision.placements))
        new = tuple(replace(item, replica=numbers[item.replica]) for item in decision.placements)
        explanation = tuple(
            replace(item, replica=numbers[item.replica]) for item in decision.explanation if decision.placements
        )
    else:
        is_job = workload.spec.kind is WorkloadKind.TRAINING_JOB
        among = [item for item in stand if not (is_job and item is stand[0])]
        gone = _dearest(snapshot, workload, among, len(stand) - replicas)
    # Enough others are healthy, or so many that those on lost nodes would exceed the maximum.
    over = len(stand) + len(new) + len(fallen) - most
    gone += fallen if len(stand) + len(new) >= replicas else fallen[: max(0, over)]
    if not gone and not new:
        return None
    return WorkloadScaled(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        released=tuple(sorted(item.replica for item in gone)),
        placements=new,
        explanation=explanation,
    )
