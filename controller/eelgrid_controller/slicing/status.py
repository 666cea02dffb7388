"""Partitioned GPUs for operators: what is wanted, whether it stands, who sits there, what the agent says.

Owns these words. Must not know plans.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.slices import stands
from eelgrid_controller.slicing.survey import Seat
from eelgrid_controller.state import ClusterState
from eelgrid_protos.messages import ApplyStatus, Gpu, PartitionStatus, PlanApplied, Resident, Workload
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST

__all__ = ["problem_of", "statuses"]

_PROBLEMS = frozenset({ApplyStatus.REFUSED, ApplyStatus.FAILED})


class Answers(Protocol):
    """What agents said of their plans."""

    def applied(self, node_name: str) -> PlanApplied | None:
        """The newest word of a node."""


def problem_of(answers: Answers, seat: Seat) -> str:
    """Why the agent did not do what is wanted of a GPU; nothing where it did, or is at it."""
    return _problem(answers, seat.node_name, seat.running.uuid)


def _problem(answers: Answers, node_name: str, uuid: str) -> str:
    applied = answers.applied(node_name)
    said = [one for one in (applied.results if applied else ()) if one.subject == uuid and one.status in _PROBLEMS]
    # An agent's longest sentence and a word before it are longer than a sentence may be.
    return f"{said[0].rule or said[0].status.name.lower()}: {said[0].detail}"[:SENTENCE_LETTERS_MOST] if said else ""


def statuses(state: ClusterState, answers: Answers) -> Iterator[PartitionStatus]:
    """Every GPU that is the planner's, by node and index."""
    for name in sorted(state.nodes):
        record = state.nodes[name]
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            if record.keeps(gpu):
                layout = record.layouts.get(gpu.uuid)
                is_there = layout is not None and stands(gpu, layout)
                yield PartitionStatus(
                    node_name=name,
                    gpu_index=gpu.index,
                    model=gpu.model,
                    wanted=layout,
                    stands=is_there,
                    residents=tuple(_residents(record, gpu, state.workloads)),
                    problem="" if is_there else _problem(answers, name, gpu.uuid),
                )


def _residents(record: NodeRecord, gpu: Gpu, workloads: Mapping[str, Workload]) -> Iterator[Resident]:
    held = [item for item in record.assignments.values() if item.gpu_instance and gpu.uuid in item.gpu_uuids]
    for item in sorted(held, key=lambda one: one.gpu_instance.start if one.gpu_instance else 0):
        if item.gpu_instance is not None:
            name = workloads[item.workload_id].spec.name
            yield Resident(workload_id=item.workload_id, name=name, replica=item.replica, slice=item.gpu_instance)
