"""What is written for a unit of mode `dra` that got its devices, and what one gives up that did not.

Owns the bodies of claims and the plans of pods. Must not know how they are sent, nor why it is these devices.

Theory. A claim of one pod alone is reserved for it in the same write, as kube-scheduler would do
next: it then binds without a write of its own (measured in docs/how-to/kubernetes-claims.md). A reservation
for a pod that is not bound is taken back like the allocation, as kube-scheduler itself does.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from eelgrid_controller.kubernetes.claim_events import Body, Grant, Release, Write
from eelgrid_controller.kubernetes.claim_looking import Wanted
from eelgrid_controller.kubernetes.claim_units import Book, Member, is_ours
from eelgrid_controller.kubernetes.claims import Allocation
from eelgrid_controller.kubernetes.device_pools import DRIVER, results_of
from eelgrid_controller.kubernetes.plans import CLAIMED, Plan, plan_text

if TYPE_CHECKING:
    from eelgrid_controller.kubernetes.claiming import Claiming

__all__ = ["given_up", "grant"]


def grant(machine: "Claiming", wanted: Wanted, given: Iterable[Allocation]) -> Grant:
    """Everything that is written for a unit."""
    assert machine.epoch is not None
    answers = iter(given)
    writes: dict[str, Write] = {}
    releases: list[Release] = []
    for part in wanted.parts:
        node_name = part.node_name if part.bundle is None else next(answers).node_name
        for member in part.members:
            has_ours = False
            devices: list[str] = []
            for key in machine.book.needs(member.pod.uid):
                found = machine.book.claims.get(key)
                if found is None:
                    continue
                uid = found["metadata"]["uid"]
                held = machine.pools.held(uid)
                has_ours = has_ours or is_ours(held)
                devices += [one.device for one in held if one.driver == DRIVER]
                decided = machine.book.decided.get(uid)
                if decided is not None:
                    status = _reserved(machine, member, found, decided.status)
                    writes[uid] = Write(
                        uid, key, {"metadata": found["metadata"], "spec": found["spec"], "status": status}
                    )
            if not member.pod.node_name:
                releases.append(_release(machine, member, node_name, devices, is_pinned=not has_ours))
    return Grant(wanted.unit.name, machine.epoch, tuple(writes.values()), tuple(releases))


def _reserved(machine: "Claiming", member: Member, found: Body, status: Body) -> Body:
    """The reservation that kube-scheduler would add, for a claim that is this pod's alone."""
    owners = {one["uid"] for one in found["metadata"].get("ownerReferences") or ()}
    if not machine.settings.is_reserving or owners != {member.pod.uid}:
        return status
    pod = member.pod
    return {**status, "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid}]}


def _release(machine: "Claiming", member: Member, node_name: str, devices: list[str], *, is_pinned: bool) -> Release:
    assert machine.epoch is not None
    pod = member.pod
    member.released_version = pod.resource_version
    if member.unscheduled_s is not None:
        # From now on it waits for another place.
        member.unscheduled_s = None
    plan = Plan(machine.epoch, f"{CLAIMED}{pod.uid}", 0, node_name, profile=",".join(devices), uid=pod.uid)
    is_new = is_pinned and pod.is_gated
    return Release(pod.uid, member.key, pod.resource_version, node_name, plan_text(plan), is_new)


def given_up(book: Book, wanted: Wanted) -> Iterator[Body]:
    """What members of a gang that finds no room for all hold already, and none of them uses."""
    if wanted.unit.size <= 1:
        return
    for member in wanted.members:
        for key in book.needs(member.pod.uid) if member.pod.is_gated else ():
            found = book.claims.get(key)
            if found is not None and is_ours(results_of(found)) and not book.is_reserved(found, but=member.pod.uid):
                yield found
