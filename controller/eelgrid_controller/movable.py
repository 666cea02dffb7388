"""What runs and may move: one moment of the cluster, copied for a search that takes its time.

Owns the `Problem` that a search for moves is given: arrays of its own, units and
the budget. Must not know how moves are found. What is lost, cordoned, partitioned
or said to be fixed stays where it is.

Theory: a move costs the watts that the workload holds, for as long as it does no
work, spread over the time in which the move must have paid:

    restart_w = held_w * restart_s / horizon_s

A gang (a training job of several replicas) stops as a whole if one of them moves:
its replicas on one node are one unit, and each such move pays for the restart of
all. Replicas of anything else move one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eelgrid_controller.demand import TaskClass
from eelgrid_controller.room import largest, own_mix
from eelgrid_controller.snapshot import Devices, Snapshot
from eelgrid_controller.state import ClusterState
from eelgrid_kernels import CPU_PACKAGE_FULL_W, GPU_PLACEABLE, GPU_WHOLE_MILLI, Mix, Nodes
from eelgrid_kernels.move_arrays import Limits, Prices
from eelgrid_kernels.moves import OVERLAPS, RELEASES, STAYS
from eelgrid_protos.messages import (
    HORIZON_S,
    MOVES_MOST,
    MOVES_RATIO,
    RESTART_S,
    Mobility,
    MoveGoal,
    Placement,
    RecommendMovesRequest,
    ResourceRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
)

__all__ = ["GOALS", "TERMS", "Problem", "Unit", "survey"]

TERMS = ("power", "fragmentation", "stranding", "blocks")
# By what moves are found and judged, whatever the weights of placement are: measured on the openb traces, see
# docs/how-to/moves.md.
GOALS = {
    MoveGoal.POWER: Prices(power=1.0, fragmentation_w=20.0, stranding_w=50.0, block_w=0.0),
    MoveGoal.ROOM: Prices(power=0.1, fragmentation_w=100.0, stranding_w=200.0, block_w=30.0),
    MoveGoal.BALANCED: Prices(power=1.0, fragmentation_w=80.0, stranding_w=200.0, block_w=30.0),
}
_CPU_MILLI_PER_PACKAGE = 32_000
_MANNERS = {Mobility.FIXED: STAYS, Mobility.RESTARTABLE: RELEASES}


class Unit(NamedTuple):
    """What moves at once: replicas of one workload on one node."""

    workload: Workload
    row: int
    placements: tuple[Placement, ...]
    slots: tuple[tuple[int, ...], ...]
    manner: int
    restart_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A cluster at one moment, and what was asked."""

    revision: int
    goal: MoveGoal
    prices: Prices
    nodes: Nodes
    mix: Mix
    # The classes whose room is told one by one.
    largest: tuple[TaskClass, ...]
    names: tuple[str, ...]
    devices: tuple[Devices, ...]
    models: Mapping[str, int]
    units: tuple[Unit, ...]
    limits: Limits
    running: int
    restart_s: float
    horizon_s: float


def survey(state: ClusterState, snapshot: Snapshot, asked: RecommendMovesRequest) -> Problem:
    """Copies what a search needs."""
    goal = asked.goal or MoveGoal.BALANCED
    restart_s = RESTART_S if asked.restart_s is None else asked.restart_s
    horizon_s = HORIZON_S if asked.horizon_s is None else asked.horizon_s
    units = tuple(_units(state, snapshot, restart_s / horizon_s))
    running = sum(len(unit.placements) for unit in units)
    held_milli = sum(record.allocated_gpu_milli for record in state.nodes.values())
    most = asked.moves_most or max(1, int(running * (asked.moves_ratio or MOVES_RATIO)))
    return Problem(
        revision=state.revision,
        goal=goal,
        prices=GOALS.get(goal, GOALS[MoveGoal.BALANCED]),
        nodes=Nodes._make(np.array(array, order="C") for array in snapshot.nodes),
        mix=own_mix(snapshot.mix),
        largest=largest(state.demand.counts),
        names=tuple(snapshot.names),
        devices=tuple(snapshot.devices),
        models=dict(snapshot.models),
        units=units,
        limits=Limits(min(most, MOVES_MOST), int(held_milli * (asked.gpu_ratio or 1.0)), 1.0, False, 0),
        running=running,
        restart_s=restart_s,
        horizon_s=horizon_s,
    )


def _units(state: ClusterState, snapshot: Snapshot, restart_share: float) -> Iterator[Unit]:
    rows = {name: row for row, name in enumerate(snapshot.names)}
    slot_of = [{uuid: slot for slot, uuid in enumerate(devices.uuids)} for devices in snapshot.devices]
    common: dict[tuple[bool, tuple[str, ...]], bool] = {}
    for workload in state.workloads.values():
        if workload.phase is not WorkloadPhase.PLACED:
            continue
        spec = workload.spec
        asked = spec.request.gpu_count > 0, spec.required_traits
        if asked not in common:
            common[asked] = _are_common(state, *asked)
        is_gang = spec.kind is WorkloadKind.TRAINING_JOB and spec.replicas > 1
        groups: dict[tuple[int, int], list[Placement]] = {}
        for placement in workload.placements:
            row = rows[placement.node_name]
            groups.setdefault((row, -1 if is_gang else placement.replica), []).append(placement)
        for (row, _), placements in groups.items():
            known = all(uuid in slot_of[row] for placement in placements for uuid in placement.gpu_uuids)
            slots = tuple(
                tuple(slot_of[row][uuid] for uuid in placement.gpu_uuids) if known else () for placement in placements
            )
            # What is lost, cordoned or partitioned is not ours to empty.
            usable = known and all(
                snapshot.nodes.gpu_state[row, slot] == GPU_PLACEABLE for held in slots for slot in held
            )
            usable = usable and state.nodes[placements[0].node_name].is_ready and common[asked]
            held_w = _held_w(snapshot.nodes, row, slots[0], spec.request) if usable else 0.0
            stopped = spec.replicas if is_gang else 1
            yield Unit(
                workload=workload,
                row=row,
                placements=tuple(placements),
                slots=slots,
                manner=_MANNERS.get(spec.mobility, OVERLAPS) if usable else STAYS,
                restart_w=held_w * stopped * restart_share,
            )


def _are_common(state: ClusterState, on_gpus: bool, traits: tuple[str, ...]) -> bool:
    """Whether every open node that has what is asked for at all has these traits: the search does not know who has them."""
    return not traits or all(
        set(traits) <= set(record.others.traits)
        for record in state.nodes.values()
        if record.is_open and (record.inventory.gpus or not on_gpus)
    )


def _held_w(nodes: Nodes, row: int, slots: Sequence[int], request: ResourceRequest) -> float:
    """Watts of what one replica holds, at full work."""
    gpu_w = sum(float(nodes.gpu_busy_w[row, slot]) for slot in slots) * request.gpu_milli / GPU_WHOLE_MILLI
    return gpu_w + CPU_PACKAGE_FULL_W * request.cpu_milli / _CPU_MILLI_PER_PACKAGE
