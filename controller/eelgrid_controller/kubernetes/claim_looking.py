"""One look at one unit of mode `dra`: what its pods hold, what they lack, what no longer fits.

Owns the answer. Must not know events, nor which devices are free.

Theory. For each pod the question is the same: are all its claims allocated on one node that does for it,
and is its gate gone? Pods that share a claim end on one node, so they are looked for together.
Claims of other drivers are kube-scheduler's to allocate: a pod that has only such is pinned
to a node where they are free, and that pin, unlike an allocation, cannot be taken back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from eelgrid_controller.kubernetes.claim_events import Instruction, Key, Recreate, Strip, Tell
from eelgrid_controller.kubernetes.claim_reading import ClaimRead, ClaimRefused
from eelgrid_controller.kubernetes.claim_units import Book, Member, Unit, is_ours
from eelgrid_controller.kubernetes.claims import AskedClaim, Bundle
from eelgrid_controller.kubernetes.constraints import unmet
from eelgrid_controller.kubernetes.device_pools import DRIVER, results_of
from eelgrid_controller.kubernetes.names import GATE
from eelgrid_controller.kubernetes.node_room import Burden
from eelgrid_controller.kubernetes.owners import Refused
from eelgrid_controller.kubernetes.plans import CLAIMED

if TYPE_CHECKING:
    from eelgrid_controller.kubernetes.claiming import Claiming

__all__ = ["Body", "Unfit", "Wanted", "apart", "look"]

Body = Mapping[str, Any]
_PATIENCE_S = 30.0  # before people are told of what mends itself


class Unfit(NamedTuple):
    """An allocation that is to be taken back."""

    found: Body
    why: str


class _Part(NamedTuple):
    """Pods that end on one node: `bundle` is what they lack, on a node that is not known yet where that is empty."""

    members: tuple[Member, ...]
    bundle: Bundle | None
    node_name: str


@dataclass(slots=True)
class Wanted:
    """What a unit needs, all of it at once."""

    unit: Unit
    parts: list[_Part] = field(default_factory=list)
    burdens: dict[str, Burden] = field(default_factory=dict)

    @property
    def bundles(self) -> list[Bundle]:
        """What devices are looked for."""
        return [one.bundle for one in self.parts if one.bundle is not None]

    @property
    def members(self) -> list[Member]:
        """Its pods."""
        return [member for part in self.parts for member in part.members]

    @property
    def order(self) -> tuple[int, float, str]:
        """Who is served first: by priority, then by age."""
        first = self.members[0]
        return (-first.claimant.priority, first.pod.created_s or 0.0, self.unit.name)


class _Blocked(Exception):
    """A pod that cannot go on, and what people are told of it."""

    def __init__(
        self, text: str, *, is_warning: bool = False, is_released: bool = False, is_quiet: bool = False
    ) -> None:
        self.is_warning, self.is_released, self.is_quiet = is_warning, is_released, is_quiet
        super().__init__(text)


def is_steered(member: Member) -> bool:
    """Whether a pod is ours to place: it waits behind our gate, or was let go with a plan of ours."""
    plan = member.plan
    return member.pod.is_gated or (plan is not None and plan.workload.startswith(CLAIMED))


def look(machine: "Claiming", unit: Unit, at_s: float) -> Iterator[Instruction | Wanted | Unfit]:
    """What is to be done about a unit now."""
    assert machine.epoch is not None
    todo: list[Member] = []
    gated: list[Member] = []
    is_blocked = False
    for member in unit.alive:
        if not is_steered(member):
            continue
        try:
            told = list(_one(machine, member, at_s))
        except _Blocked as error:
            is_blocked = is_blocked or member.pod.is_gated
            if error.is_released and member.pod.is_gated:
                yield Strip(member.pod.uid, member.key, member.pod.resource_version, machine.epoch, str(error))
            elif not error.is_quiet or at_s - member.seen_s > _PATIENCE_S:
                yield from _told(member, str(error), is_warning=error.is_warning)
            continue
        if told:
            yield from told
            is_blocked = is_blocked or member.pod.is_gated
        elif member.pod.is_gated:
            if member.released_version != member.pod.resource_version:
                gated.append(member)
        elif _lacks(machine, member) and (member.pod.node_name or at_s >= member.settled_s):
            todo.append(member)
    present = sum(not one.pod.is_going for one in unit.alive)
    if gated and present < unit.size:
        yield from _told(gated[0], f"waits for its gang: {present} of {unit.size} members are here")
    elif not is_blocked:
        todo += gated
    if todo:
        yield from _wanted(machine, unit, todo, at_s)


def _told(member: Member, text: str, *, is_warning: bool = False) -> Iterator[Tell]:
    if member.told != text:
        member.told = text
        yield Tell(member.pod.uid, member.key, text, is_warning)


# One pod


def _one(machine: "Claiming", member: Member, at_s: float) -> Iterator[Instruction | Unfit]:
    """What does not fit of what it has; nothing where it only lacks something. Raises _Blocked."""
    pod, why = member.pod, member.claimant.member
    if isinstance(why, Refused):
        is_quiet = why.needs is not None
        raise _Blocked(
            f"not placed: {why}", is_warning=True, is_released=member.claimant.is_released, is_quiet=is_quiet
        )
    others = [gate for gate in pod.gates if gate != GATE]
    if others and pod.is_gated:
        raise _Blocked(f"waits for the gates of others: {', '.join(others)}", is_quiet=True)
    claims = _claims(machine.book, member)
    if pod.node_name:
        yield from _astray(machine, member, claims)
        return
    ours = [
        found for found in claims if is_ours(results_of(found)) and found["metadata"]["uid"] not in machine.book.decided
    ]
    node_name = next((node for found in ours if (node := machine.book.node_of(found))), "")
    if not node_name:
        if member.plan is not None and not pod.is_gated and not _has_ours(machine.book, claims):
            yield from _stuck(machine, member, member.plan.node_name, at_s)
        return
    reason = _misfit(machine, member, ours, node_name, at_s)
    if not reason:
        return
    if any(machine.book.is_reserved(found, but=pod.uid) for found in ours):
        raise _Blocked(f"its claim is in use on {node_name}, and {reason}", is_warning=True)
    if not pod.is_gated:
        member.settled_s = at_s + machine.settings.settle_s
    for found in ours:
        yield Unfit(found, reason)


def _claims(book: Book, member: Member) -> list[Body]:
    """The claims of a pod, all of them made and understood."""
    found: list[Body] = []
    for one in member.pod.claims:
        if not one.claim_name:
            of = f" of template {one.template_name}" if one.template_name else ""
            raise _Blocked(f"waits for its claim {one.name}{of} to be made", is_quiet=True)
        claim = book.claims.get(Key(member.pod.namespace, one.claim_name))
        if claim is None:
            raise _Blocked(f"waits for ResourceClaim {one.claim_name}, which is not there", is_quiet=True)
        metadata = claim["metadata"]
        if metadata.get("deletionTimestamp"):
            raise _Blocked(f"ResourceClaim {one.claim_name} is being deleted", is_quiet=True)
        if one.template_name and all(owner["uid"] != member.pod.uid for owner in metadata.get("ownerReferences") or ()):
            raise _Blocked(f"ResourceClaim {one.claim_name} was made for another pod; delete it", is_warning=True)
        read = book.read(claim)
        if isinstance(read, ClaimRefused):
            text = f"not placed: ResourceClaim {one.claim_name} {read}"
            raise _Blocked(text, is_warning=True, is_released=member.claimant.is_released)
        found.append(claim)
    return found


def _has_ours(book: Book, claims: Iterable[Body]) -> bool:
    return any(isinstance(read := book.read(found), ClaimRead) and read.is_ours for found in claims)


def _astray(machine: "Claiming", member: Member, claims: Iterable[Body]) -> Iterator[Instruction]:
    """A pod that was bound while its claim was given to it elsewhere cannot start."""
    assert machine.epoch is not None
    node_name = member.pod.node_name
    for found in claims:
        at = machine.book.node_of(found)
        if is_ours(results_of(found)) and at != node_name and not member.pod.is_going:
            why = f"bound to {node_name}, and its claim {found['metadata']['name']} is on {at}"
            if member.pod.owner is not None:
                yield Recreate(member.pod.uid, member.key, machine.epoch, why)
            else:
                yield from _told(member, f"{why}; delete it and create it again", is_warning=True)
            return


def _stuck(machine: "Claiming", member: Member, node_name: str, at_s: float) -> Iterator[Instruction]:
    """A pod that had to be pinned and cannot be scheduled there is made anew, more and more rarely."""
    assert machine.epoch is not None
    since_s = member.unscheduled_s
    owner = member.pod.owner
    if since_s is None or at_s - since_s < machine.settings.unbound_s:
        return
    why = f"pinned to {node_name}, where kube-scheduler cannot put it: {member.pod.unscheduled_message}"
    if owner is None:
        yield from _told(member, f"{why}; delete it and create it again", is_warning=True)
    elif machine.watchdog.may_recreate(owner.uid, at_s - since_s, at_s):
        machine.watchdog.recreated(owner.uid, at_s - since_s, at_s)
        member.unscheduled_s = at_s
        yield Recreate(member.pod.uid, member.key, machine.epoch, why)


def _misfit(machine: "Claiming", member: Member, ours: Iterable[Body], node_name: str, at_s: float) -> str:
    """Why a pod cannot stay where its devices are; empty where it can."""
    reason = machine.room.closed(node_name) or unmet(member.pod.constraint, machine.room.nodes[node_name])
    if reason:
        return reason
    pool = machine.pools.at(DRIVER, node_name)
    if pool is None and node_name not in machine.pools.nodes(DRIVER):
        return f"no devices of {node_name} are published any more"
    for one in (result for found in ours for result in results_of(found)) if pool is not None else ():
        assert pool is not None
        offer = pool.offers.get(one.device)
        if offer is None or offer.is_closed:
            return f"device {one.device} of {node_name} {'is no more' if offer is None else 'is not well'}"
    since_s = member.unscheduled_s
    if since_s is not None and at_s - since_s >= machine.settings.unbound_s:
        member.avoid[node_name] = at_s + machine.settings.avoid_s
        return f"kube-scheduler cannot put it on {node_name}: {member.pod.unscheduled_message}"
    return ""


def _lacks(machine: "Claiming", member: Member) -> bool:
    """Whether a pod without our gate has a claim of ours that holds nothing, or whose allocation was not seen."""
    for key in machine.book.needs(member.pod.uid):
        found = machine.book.claims.get(key)
        if found is None:
            continue
        if found["metadata"]["uid"] in machine.book.decided:
            return True
        read = machine.book.read(found)
        if isinstance(read, ClaimRead) and read.is_ours and not machine.book.is_allocated(found):
            return True
    return False


# All pods that lack something


def _wanted(machine: "Claiming", unit: Unit, todo: list[Member], at_s: float) -> Iterator[Instruction | Wanted | Unfit]:
    wanted = Wanted(unit)
    for members in _components(machine.book, todo):
        try:
            part = _part(machine, wanted, members, at_s)
        except _Blocked as error:
            yield from _told(members[0], str(error), is_warning=error.is_warning)
            return
        if part is None:
            assert machine.epoch is not None
            for one in members:
                if one.pod.is_gated:
                    why = "its claims are kube-scheduler's to allocate"
                    yield Strip(one.pod.uid, one.key, one.pod.resource_version, machine.epoch, why)
            continue
        wanted.parts.append(part)
    if wanted.parts:
        yield wanted


def _components(book: Book, members: Iterable[Member]) -> list[list[Member]]:
    """Pods that share claims, directly or by way of others."""
    groups: list[tuple[set[Key], list[Member]]] = []
    for member in members:
        keys, together = set(book.needs(member.pod.uid)), [member]
        apart = []
        for other in groups:
            if keys & other[0]:
                keys |= other[0]
                together = [*other[1], *together]
            else:
                apart.append(other)
        groups = [*apart, (keys, together)]
    return [together for _, together in groups]


def _part(machine: "Claiming", wanted: Wanted, members: list[Member], at_s: float) -> _Part | None:
    """What pods of one node lack; None where nothing of it is ours to say."""
    book = machine.book
    nodes = {one.pod.node_name for one in members} - {""}
    lacking: dict[Key, AskedClaim] = {}
    is_judged = False
    for key in dict.fromkeys(key for one in members for key in book.needs(one.pod.uid)):
        found = book.claims.get(key)
        read = None if found is None else book.read(found)
        if found is None or not isinstance(read, ClaimRead):
            continue
        if book.is_allocated(found):
            is_judged = is_judged or read.is_ours
            nodes.add(book.node_of(found))
        elif read.is_ours or (read.driver and not machine.pools.is_abroad(read.driver)):
            is_judged = True
            lacking[key] = read.asked
    nodes.discard("")
    if not is_judged and not nodes:
        return None
    if len(nodes) > 1:
        raise _Blocked(f"its claims and pods are on {', '.join(sorted(nodes))}: free one of them", is_warning=True)
    node_name = next(iter(nodes), "")
    if not lacking:
        return _Part(tuple(members), None, node_name)
    token = members[0].pod.uid
    avoid = frozenset(node for one in members for node, until_s in one.avoid.items() if until_s > at_s)
    pods = tuple(one.pod for one in members)
    wanted.burdens[token] = Burden(pods, frozenset() if node_name else avoid)
    kind = (
        tuple((one.variants, one.same) for one in lacking.values()), avoid,
        tuple((pod.constraint, pod.requested.cpu_milli, pod.requested.memory_bytes) for pod in pods),
    )  # fmt: skip
    group = wanted.unit.name if wanted.unit.size > 1 else ""
    bundle = Bundle(claims=tuple(lacking.values()), node_name=node_name, group=group, kind=kind, token=token)
    return _Part(tuple(members), bundle, node_name)


def apart(wanted: Iterable[Wanted], later: dict[str, None]) -> list[Wanted]:
    """Units without a claim in common; of those that share one, all but the first go into `later`: they follow it."""
    taken: set[str] = set()
    found = []
    for one in wanted:
        claims = {asked.uid for bundle in one.bundles for asked in bundle.claims}
        if claims & taken:
            later[one.unit.name] = None
        else:
            taken |= claims
            found.append(one)
    return found
