"""Chooses the nodes of reservations that state a number of GPUs, when they become part of the policy.

The rule itself is in queueing/reservations.py. Must not know how a policy is revised.
"""

from collections.abc import Sequence
from dataclasses import replace

from eelgrid_controller.core.workloads import resolve_reported_models
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.queueing.backfill import EstimatedEnds, ReservedStart
from eelgrid_controller.queueing.reservations import choose_nodes, list_offers
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
