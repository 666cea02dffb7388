"""Chooses the nodes of reservations that state a number of GPUs: when they become part of the policy, and when one is lost.

The rule itself is in queueing/reservations.py. Must not know how a policy is revised, nor when nodes change.

Theory. Of the chosen nodes those stay that are there and open; only what these lack is chosen anew, by the same rule as at
first, and beside all that was promised meanwhile. If too few GPUs can be had, all of these are taken, the lost nodes stay in the
reservation, so that it has them when they are back, and it says how many it lacks.
"""

from collections.abc import Sequence
from dataclasses import replace

from eelgrid_controller.core.workloads import resolve_reported_models
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.queueing.backfill import EstimatedEnds, ReservedStart
from eelgrid_controller.queueing.reservations import choose_nodes, count_usable_gpus, list_offers
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import Policy, Reservation


def choose_reserved_nodes(
    state: ClusterState,
    placer: WorkloadPlacer,
    ends: EstimatedEnds,
    kept: Sequence[ReservedStart],
    policy: Policy,
    *,
    now_ns: int,
) -> Policy:
    """Returns a policy with the nodes of reservations that state a number of GPUs and name none.

    `kept` are promised starts that they must not break. Raises InvalidArgument, which names the field, if so many cannot be had.
    """
    chosen: list[Reservation] = []
    for index, one in enumerate(policy.reservations):
        if not one.gpus or one.node_names:
            chosen.append(one)
            continue
        field = f"policy.reservations[{index}]"
        models = resolve_reported_models(one.gpu_models, f"{field}.gpu_models", placer.snapshot().models)
        wanted = replace(one, gpu_models=models)
        others = (*chosen, *policy.reservations[index + 1 :])
        offers = list_offers(state, ends, kept, wanted, others=others, now_ns=now_ns)
        names = choose_nodes(offers, one.gpus)
        if not names:
            count = sum(offer.free for offer in offers)
            problem = f"is {one.gpus}, and {count} can be had then: others are held, reserved or promised"
            less = f"ask for {count} at the most, " if count else ""
            remedy = f"{less}let it start later, or name nodes"
            raise InvalidArgument("so many GPUs cannot be reserved", (Violation(f"{field}.gpus", problem, remedy),))
        chosen.append(replace(wanted, node_names=names))
    return replace(policy, reservations=tuple(chosen))


def renew_reserved_nodes(
    state: ClusterState, ends: EstimatedEnds, kept: Sequence[ReservedStart], *, now_ns: int
) -> Policy | None:
    """Returns the policy with other nodes for reservations of a number of GPUs that have lost some, or lacked some; None for none."""
    policy = state.policy
    renewed: list[Reservation] = []
    for index, one in enumerate(policy.reservations):
        is_chosen = one.gpus and one.node_names and one.end_ns > now_ns
        others = (*renewed, *policy.reservations[index + 1 :])
        renewed.append(_renew(state, ends, kept, one, others=others, now_ns=now_ns) if is_chosen else one)
    after = tuple(renewed)
    return None if after == policy.reservations else replace(policy, reservations=after)


def _renew(
    state: ClusterState,
    ends: EstimatedEnds,
    kept: Sequence[ReservedStart],
    one: Reservation,
    *,
    others: Sequence[Reservation],
    now_ns: int,
) -> Reservation:
    lost = [name for name in one.node_names if describe_loss(state, name)]
    left = [name for name in one.node_names if name not in lost]
    wanted = one.gpus - sum(count_usable_gpus(state, ends, one, name, now_ns=now_ns) for name in left)
    if not lost and not one.lacking_gpus and (wanted <= 0 or not _has_lost_gpus(state, left)):
        return one
    new: tuple[str, ...] = ()
    lacking = 0
    if wanted > 0:
        offers = list_offers(
            state, ends, kept, one, others=(*others, replace(one, node_names=tuple(left))), now_ns=now_ns
        )
        new = choose_nodes(offers, wanted)
        if not new:
            new = tuple(offer.node_name for offer in offers)
            lacking = wanted - sum(offer.free for offer in offers)
    names = tuple(sorted({*left, *new, *(lost if lacking else ())}))
    cause = one.change_cause
    if names != tuple(sorted(one.node_names)) or lacking != one.lacking_gpus:
        cause = describe_loss(state, lost[0]) if lost else "gpus: some of its GPUs are lost" if lacking else cause
    return replace(one, node_names=names, lacking_gpus=lacking, change_cause=cause)


def describe_loss(state: ClusterState, node_name: str) -> str:
    """Returns why a node is none that a reservation can have: the cause, a colon and a sentence; empty if it can."""
    record = state.nodes.get(node_name)
    if record is None or not record.is_ready:
        return f"node: {node_name} is lost"
    return f"node: {node_name} is {record.cordon_reason()}" if record.cordon is not None else ""


def _has_lost_gpus(state: ClusterState, names: Sequence[str]) -> bool:
    return any(
        gpu.uuid in record.lost_gpus or record.gpu_cordon_reason(gpu)
        for record in (state.nodes[name] for name in names)
        for gpu in record.inventory.gpus
    )
