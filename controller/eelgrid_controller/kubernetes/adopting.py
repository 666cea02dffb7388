"""Taking over pods that stand: which of them the core is asked to hold, and as which workload.

Owns that choice and what it needs to know. Must not know events, the API or how the core
decides; time is an argument.

Theory. A pod with a plan of ours that is bound, in a unit that the core holds nothing of, was
placed by another leader, or by this one with a journal that is lost. It is asked for as it
stands: on its node, with the devices of its plan. A unit is taken over only when all of its
members are bound: to one in parts nothing could be added later, so its members stay what
others hold, by name, and the rest is asked for. What its people want is read only then, from the pods,
which keep their annotations: reading it from every pod that runs would cost for nothing. The
pin is left out of what is demanded of nodes: it says where the pod went, not where it may go.
What the core refuses is asked again later and stays counted as what others hold until then.
"""

from collections.abc import Sequence

from eelgrid_controller import occupancy
from eelgrid_controller.kubernetes.constraints import trait
from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit
from eelgrid_controller.kubernetes.gate_events import Adopt, Instruction, Recall
from eelgrid_controller.kubernetes.names import RESOURCE_GPU
from eelgrid_controller.kubernetes.others import Others
from eelgrid_controller.kubernetes.plans import attempt_of, unit_of
from eelgrid_controller.kubernetes.selectors import Constraint
from eelgrid_controller.kubernetes.unit_specs import unit_spec
from eelgrid_controller.occupancy import Adoption, Standing
from eelgrid_protos.messages import SubmitWorkloadRequest

__all__ = ["UNTOLD_S", "adopting", "stands", "unpinned"]

UNTOLD_S = 2.0  # until nodes are asked about again that the core was not told of


def adopting(unit: Unit, others: Others, at_s: float) -> list[Instruction]:
    """What is to be asked for a unit that stands and that the core holds nothing of; nothing for all others."""
    unit.stand = Stand.UNKNOWN  # what was refused is asked for again, if it still stands
    members = _standing(unit)
    if not members:
        return []
    unread = [member for member in members if member.spec is None]
    if unread:
        told: list[Instruction] = [Recall(one.uid, one.sight.key) for one in unread if not one.is_recalled]
        for member in unread:
            member.is_recalled = True
        return told
    if len(members) != max(member.size for member in members):
        return []
    if not all(others.knows(member.sight.pod.node_name) for member in members):
        unit.stand, unit.retry_s = Stand.REFUSED, at_s + UNTOLD_S
        return []
    plans = [member.sight.plan for member in members if member.sight.plan is not None]
    unit.attempt = max(unit.attempt, *(attempt_of(plan.workload) for plan in plans))
    ordered = _numbered(members)
    unit.slots = {replica: member.uid for replica, member in enumerate(ordered)}
    unit.stand = Stand.ASKED
    spec = unit_spec(
        [member.spec for member in ordered if member.spec is not None],
        {trait(unpinned(member.sight.pod.constraint)) for member in ordered},
    )
    adoption = Adoption(standing=tuple(stands(member, others, spec.request.gpu_count) for member in ordered))
    return [Adopt(SubmitWorkloadRequest(workload_id=unit.workload_id, spec=spec), adoption)]


def stands(member: Member, others: Others, gpu_count: int) -> Standing:
    """Where a member is, with the devices of its plan, and what it counts for among others.

    Where a replica has more GPUs than the pod asks for, any that are free come to those of the plan.
    """
    pod, devices = member.sight.pod, others.planned.named(member.uid)
    return Standing(
        node_name=member.target,
        gpu_indexes=devices,
        is_exact=bool(devices) and len(devices) == gpu_count,
        counted=occupancy.Others(
            cpu_milli=pod.requested.cpu_milli,
            memory_bytes=pod.requested.memory_bytes,
            gpu_count=pod.requested.count(RESOURCE_GPU),
            gpu_indexes=devices,
        ),
    )


def unpinned(constraint: Constraint) -> Constraint:
    """The demands of a pod without the one node that it was pinned to."""
    if constraint.terms is None:
        return constraint
    terms = {term._replace(fields=()) for term in constraint.terms}
    # A term of the pin alone demands nothing else; beside others that any node may meet, so does the whole.
    kept = None if any(not term.labels for term in terms) else tuple(sorted(terms))
    return constraint._replace(terms=kept)


def _standing(unit: Unit) -> list[Member]:
    """All members, where every one of them is bound as it was planned; none where not."""
    members = [member for member in unit.members.values() if not member.is_over]
    for member in members:
        pod, plan = member.sight.pod, member.sight.plan
        if plan is None or plan.profile or unit_of(plan.workload) != unit.name:
            return []
        if not pod.node_name or pod.is_going or plan.node_name != pod.node_name:
            return []
    return members


def _numbered(members: Sequence[Member]) -> list[Member]:
    """By the replicas of their plans; replicas of the core have no gaps, so who comes later moves up."""
    return sorted(members, key=lambda one: (one.sight.plan.replica if one.sight.plan else 0, one.sight.key, one.uid))
