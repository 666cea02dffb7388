"""Comparison of two clusters: totals, room for typical work, and the workloads that fare differently.

Owns these figures. Must not know how the second cluster came about: scenarios and shadow policies make it.

Theory: values that no event touched are shared between a state and its copy, so that "is the same object" is
"nothing changed", and a comparison costs what the changes touched. Memory is no part of a class of the mix, so
the room leaves it out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.planner import count_fitting_tasks
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import TaskClass
from eelgrid_protos.messages import (
    ClassRoom,
    ClusterFigures,
    ImaginedOutcome,
    NodeState,
    OutcomeCount,
    Workload,
    WorkloadDifference,
    WorkloadPhase,
)

# Classes of the mix that room is counted for, the most frequent first.
ROOMS_MOST = 16
# Replicas asked for when the question is how many there is room for.
_WITHOUT_END = 1_000_000_000
_NODES_NAMED = 8
# Bad news first.
_ORDER = (
    ImaginedOutcome.DISPLACED,
    ImaginedOutcome.REFUSED,
    ImaginedOutcome.WAITS,
    ImaginedOutcome.MOVED,
    ImaginedOutcome.PLACED,
    ImaginedOutcome.CANCELLED,
)


def compute_cluster_figures(core: Core) -> ClusterFigures:
    """The totals of a cluster."""
    state, snapshot = core.state, core.snapshot()
    ready = [record for record in state.nodes.values() if record.state is NodeState.READY]
    phases = state.phases
    return ClusterFigures(
        nodes_ready=len(ready),
        gpus=sum(len(record.inventory.gpus) for record in ready),
        allocated_gpu_milli=sum(record.allocated_gpu_milli for record in state.nodes.values()),
        cpu_milli=sum(record.inventory.cpu_milli for record in ready),
        allocated_cpu_milli=sum(record.allocated_cpu_milli for record in state.nodes.values()),
        placed=phases[WorkloadPhase.PLACED],
        pending=phases[WorkloadPhase.PENDING],
        modelled_power_w=core.modelled_power_w(),
        # Lost nodes take no work, so that nothing free on them counts as fragmented.
        fragmented_gpu_milli=round(int(snapshot.fragments[snapshot.nodes.available].sum()) / snapshot.mix.total),
    )


def count_class_room(core: Core, classes: Iterable[TaskClass]) -> tuple[int, ...]:
    """How many more tasks of each class fit."""
    snapshot = core.snapshot()
    return tuple(count_fitting_tasks(snapshot.nodes, snapshot.models, entry, _WITHOUT_END) for entry in classes)


def compare_class_room(
    mix: Sequence[tuple[TaskClass, int]], before: Sequence[int], after: Sequence[int]
) -> tuple[ClassRoom, ...]:
    """The room for each class, before and after; at most ROOMS_MOST."""
    total = sum(weight for _, weight in mix) or 1
    return tuple(
        ClassRoom(**entry._asdict(), share=weight / total, before=was, after=now)
        for (entry, weight), was, now in zip(mix, before, after, strict=False)
    )


def _nodes(workload: Workload) -> tuple[str, ...]:
    return tuple(dict.fromkeys(placement.node_name for placement in workload.placements))


def _outcome(was: Workload | None, now: Workload) -> ImaginedOutcome | None:
    """What became of a workload; None for nothing."""
    if now.phase is WorkloadPhase.CANCELLED:
        return ImaginedOutcome.CANCELLED if was and was.phase is not WorkloadPhase.CANCELLED else None
    if now.phase is WorkloadPhase.PENDING:
        if was is None:
            return ImaginedOutcome.WAITS
        return ImaginedOutcome.DISPLACED if was.phase is WorkloadPhase.PLACED else None
    if was is None or was.phase is WorkloadPhase.PENDING:
        return ImaginedOutcome.PLACED
    return ImaginedOutcome.MOVED if was.placements != now.placements else None


def _why(was: Workload | None, now: Workload, outcome: ImaginedOutcome, drained: frozenset[str]) -> str:
    match outcome:
        case ImaginedOutcome.DISPLACED | ImaginedOutcome.WAITS:
            return now.reason
        case ImaginedOutcome.MOVED if was is not None:
            left = [name for name in _nodes(was) if name in drained]
            return f"{', '.join(left[:_NODES_NAMED])} taken out of use" if left else "placed anew"
        case ImaginedOutcome.PLACED if was is not None:
            return f"waited for {was.reason}" if was.reason else "waited"
        case _:
            return ""


def find_workload_differences(
    before: Mapping[str, Workload], state: ClusterState, drained: frozenset[str]
) -> Iterator[WorkloadDifference]:
    """Every workload that fares differently, in the order of submission."""
    for key, now in state.workloads.items():
        was = before.get(key)
        outcome = None if was is now else _outcome(was, now)
        if outcome is None:
            continue
        explanation = state.explanations.get(now.workload_id) if now.placements else ()
        yield WorkloadDifference(
            workload_id=now.workload_id,
            name=now.spec.name,
            outcome=outcome,
            nodes_before=_nodes(was)[:_NODES_NAMED] if was else (),
            nodes_after=_nodes(now)[:_NODES_NAMED],
            reason=_why(was, now, outcome, drained),
            candidate=explanation[0].candidates[0] if explanation and explanation[0].candidates else None,
        )


def sort_by_severity(found: Iterable[WorkloadDifference]) -> list[WorkloadDifference]:
    """By outcome; those of one outcome stay in their order."""
    return sorted(found, key=lambda difference: _ORDER.index(difference.outcome))


def count_outcomes(found: Iterable[WorkloadDifference]) -> tuple[OutcomeCount, ...]:
    """How many workloads have each outcome, the bad news first."""
    counts = Counter(difference.outcome for difference in found)
    return tuple(OutcomeCount(outcome=outcome, workloads=counts[outcome]) for outcome in _ORDER if counts[outcome])


def compare_placements(
    live: Mapping[str, Workload], shadow: ClusterState, keys: Iterable[str], most: int
) -> tuple[dict[str, int], tuple[WorkloadDifference, ...]]:
    """How two clusters placed the same workloads, by count, and the first `most` that differ."""
    counts = dict.fromkeys(("alike", "elsewhere", "live_alone", "shadow_alone", "neither"), 0)
    found: list[WorkloadDifference] = []
    for key in keys:
        here, there = live.get(key), shadow.workloads.get(key)
        if here is None or here.phase is WorkloadPhase.CANCELLED:
            continue
        was, now = here.placements, there.placements if there else ()
        name = "live_alone" if was and not now else "shadow_alone" if now and not was else ""
        name = name or ("neither" if not was else "alike" if was == now else "elsewhere")
        counts[name] += 1
        if name in {"alike", "neither"} or len(found) == most:
            continue
        outcomes = {
            "live_alone": ImaginedOutcome.WAITS,
            "shadow_alone": ImaginedOutcome.PLACED,
            "elsewhere": ImaginedOutcome.MOVED,
        }
        explanation = shadow.explanations.get(key)
        found.append(
            WorkloadDifference(
                workload_id=key,
                name=here.spec.name,
                outcome=outcomes[name],
                nodes_before=_nodes(here)[:_NODES_NAMED],
                nodes_after=_nodes(there)[:_NODES_NAMED] if there else (),
                reason=there.reason if there else "refused",
                candidate=explanation[0].candidates[0] if explanation and explanation[0].candidates else None,
            )
        )
    return counts, tuple(found)
