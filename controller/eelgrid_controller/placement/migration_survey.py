"""The survey for moves: a copy of what a search for moves needs of one moment, and what running work keeps when it moves.

Copying takes milliseconds, while the controller's loop waits; everything else reads the copy. Must not know how moves are
searched (migration_planner.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from eelgrid_controller.placement.placer import WorkloadPlacer, restrict_to_data, restrict_to_preferred
from eelgrid_controller.placement.power import PowerSurvey
from eelgrid_controller.placement.snapshot import GpuSlots
from eelgrid_controller.queueing.reservations import list_held_nodes
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import TaskClass
from eelgrid_kernels.arrays import Mix, Nodes
from eelgrid_kernels.move_setup import copy_mix
from eelgrid_protos.messages import QUEUE_RESOURCES, RecommendMovesRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSurvey:
    """What a problem is built from: the cluster at one moment, copied where it changes, and the request."""

    asked: RecommendMovesRequest
    revision: int
    nodes: Nodes
    mix: Mix
    demand: Mapping[TaskClass, int]
    names: tuple[str, ...]
    devices: tuple[GpuSlots, ...]
    models: Mapping[str, int]
    # All that is known; a workload is replaced when it changes, never written to.
    workloads: tuple[Workload, ...]
    is_ready: tuple[bool, ...]
    # Of the nodes that take new work; None of others.
    traits: tuple[tuple[str, ...] | None, ...]
    power: PowerSurvey | None  # None without power budgets
    # GPUs shared by work with a limit on interference, by UUID.
    limited_gpus: frozenset[str]
    keeps_models: bool  # for queues have quotas of models or power, which a move does not change


def copy_nodes(nodes: Nodes) -> Nodes:
    """Returns a writable copy in one array type, for the compiler of the kernels."""
    return Nodes._make(np.array(array, order="C") for array in nodes)


def survey_for_moves(
    state: ClusterState, placer: WorkloadPlacer, asked: RecommendMovesRequest, now_ns: int
) -> MigrationSurvey:
    """Copies the state for a search; the controller's loop waits for this alone, so it looks at no GPU."""
    snapshot, held = placer.snapshot(), list_held_nodes(state, now_ns)
    if held:
        snapshot = snapshot.with_open(np.array([name not in held for name in snapshot.names], np.bool_))
    quotas = {quota.resource for queue in state.policy.queues for quota in queue.quotas}
    nodes, limited = copy_nodes(snapshot.nodes), placer.list_gpus_with_limits()
    for row, slots in enumerate(snapshot.devices if limited else ()):
        nodes.gpu_free[row, [slot for slot, uuid in enumerate(slots.uuids) if uuid in limited]] = 0
    return MigrationSurvey(
        asked=asked,
        revision=state.revision,
        nodes=nodes,
        mix=copy_mix(snapshot.mix),
        demand=dict(state.demand.counts),
        names=tuple(snapshot.names),
        devices=tuple(snapshot.devices),
        models=dict(snapshot.models),
        workloads=tuple(state.workloads.values()),
        is_ready=tuple(snapshot.is_ready),
        traits=tuple(None if name in held else has for name, has in zip(snapshot.names, snapshot.traits, strict=True)),
        power=placer.allowance.survey(snapshot.names),
        limited_gpus=limited,
        keeps_models=bool(quotas.difference(QUEUE_RESOURCES)),
    )


def keep_preferred(survey: MigrationSurvey, workload: Workload, rows: Mapping[str, int]) -> Workload:
    """Returns a workload as one that allows only what it prefers, models or nodes, of what it runs on alone."""
    near = restrict_to_data(workload.spec)
    if near is not None and all(
        set(near.required_traits) <= set(survey.traits[rows[place.node_name]] or ()) for place in workload.placements
    ):
        workload = replace(workload, spec=near)
    preferred = restrict_to_preferred(workload.spec)
    if preferred is None:
        return workload
    codes = {survey.models.get(model) for model in preferred.request.gpu_models}
    for placement in workload.placements:
        row = rows[placement.node_name]
        here = survey.devices[row].uuids
        if not all(
            uuid in here and survey.nodes.gpu_model[row, here.index(uuid)] in codes for uuid in placement.gpu_uuids
        ):
            return workload
    return replace(workload, spec=preferred)


def find_models(survey: MigrationSurvey, workload: Workload, rows: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the models of the GPUs that a workload holds."""
    held = {(rows[place.node_name], uuid) for place in workload.placements for uuid in place.gpu_uuids}
    slots = ((row, survey.devices[row].uuids.index(uuid)) for row, uuid in held if uuid in survey.devices[row].uuids)
    codes = {int(survey.nodes.gpu_model[slot]) for slot in slots}
    return tuple(model for model, code in survey.models.items() if code in codes)
