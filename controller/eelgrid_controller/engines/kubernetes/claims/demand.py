"""Evaluates one unit of mode `dra`: what its pods hold, what they lack, what no longer fits.

Pods that share a claim end on one node and are evaluated together. A pod that has only claims of other drivers is
pinned to a node where their devices are free; unlike an allocation, that pin cannot be taken back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.engines.kubernetes.claims.allocation import (
    BundleLoad,
    ClaimBundle,
    ClaimRequest,
    ClusterCapacity,
)
from eelgrid_controller.engines.kubernetes.claims.claim_store import (
    ClaimMember,
    ClaimStore,
    ClaimUnit,
    is_own_allocation,
)
from eelgrid_controller.engines.kubernetes.claims.device_pools import DRIVER_NAME, DevicePools, allocation_results
from eelgrid_controller.engines.kubernetes.claims.events import ClaimInstruction
from eelgrid_controller.engines.kubernetes.claims.requests import ClaimRejection, ParsedClaim
from eelgrid_controller.engines.kubernetes.model.owners import IntentRefusal
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_controller.engines.kubernetes.pods.gate_events import PodKey, RecordEvent, RecreatePod, RemoveGate
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import CLAIM_WORKLOAD_PREFIX
from eelgrid_controller.engines.kubernetes.scheduling.node_affinity import find_unmet_rule

Body = Mapping[str, Any]
_PATIENCE_S = 30.0  # before people are told of what mends itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAllocatorSettings:
    """How long things may take, in seconds."""

    unbound_s: float = 30.0  # that kube-scheduler may call a pod unschedulable
    settle_s: float = 2.0  # that a freed claim rests, longer than a binding that is under way
    avoid_s: float = 60.0  # that a node where a pod could not be put is not tried again
    orphan_s: float = 5.0  # that an allocation without any pod is left
    busy_s: float = 5.0
    forbidden_s: float = 60.0
    is_reserving: bool = True  # write the reservation with the allocation, where the claim is one pod's alone


class ClaimState(Protocol):
    """What is known of claims, devices and nodes; the allocator is one."""

    settings: ClaimAllocatorSettings
    epoch: int | None
    pools: DevicePools
    book: ClaimStore
    room: ClusterCapacity
    watchdog: UnboundPodWatchdog


class UnfitAllocation(NamedTuple):
    """An allocation that is to be taken back."""

    found: Body
    why: str


class _Part(NamedTuple):
    """Pods that end on one node: `bundle` is what they lack, on a node that is not known yet where that is empty."""

    members: tuple[ClaimMember, ...]
    bundle: ClaimBundle | None
    node_name: str


@dataclass(slots=True)
class ClaimDemand:
    """What a unit needs, all of it at once."""

    unit: ClaimUnit
    parts: list[_Part] = field(default_factory=list)
    burdens: dict[str, BundleLoad] = field(default_factory=dict)

    @property
    def bundles(self) -> list[ClaimBundle]:
        """What devices are looked for."""
        return [one.bundle for one in self.parts if one.bundle is not None]

    @property
    def members(self) -> list[ClaimMember]:
        """Its pods."""
        return [member for part in self.parts for member in part.members]

    @property
    def sort_key(self) -> tuple[int, float, str]:
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


def is_steered(member: ClaimMember) -> bool:
    """Whether a pod is ours to place: it waits behind our gate, or was let go with a plan of ours."""
    plan = member.plan
    return member.pod.is_gated or (plan is not None and plan.workload.startswith(CLAIM_WORKLOAD_PREFIX))


def evaluate_unit(
    state: ClaimState, unit: ClaimUnit, at_s: float
) -> Iterator[ClaimInstruction | ClaimDemand | UnfitAllocation]:
    """What is to be done about a unit now."""
    assert state.epoch is not None
    todo: list[ClaimMember] = []
    gated: list[ClaimMember] = []
    is_blocked = False
    for member in unit.active_members:
        if not is_steered(member):
            continue
        try:
            told = list(_one(state, member, at_s))
        except _Blocked as error:
            is_blocked = is_blocked or member.pod.is_gated
            if error.is_released and member.pod.is_gated:
                yield RemoveGate(member.pod.uid, member.key, member.pod.resource_version, state.epoch, str(error))
            elif not error.is_quiet or at_s - member.seen_s > _PATIENCE_S:
                yield from _event_if_new(member, str(error), is_warning=error.is_warning)
            continue
        if told:
            yield from told
            is_blocked = is_blocked or member.pod.is_gated
        elif member.pod.is_gated:
            if member.released_version != member.pod.resource_version:
                gated.append(member)
        elif _lacks(state, member) and (member.pod.node_name or at_s >= member.settled_s):
            todo.append(member)
    present = sum(not one.pod.is_deleting for one in unit.active_members)
    if gated and present < unit.size:
        yield from _event_if_new(gated[0], f"waits for its gang: {present} of {unit.size} members are here")
    elif not is_blocked:
        todo += gated
    if todo:
        yield from _unit_demand(state, unit, todo, at_s)


def _event_if_new(member: ClaimMember, text: str, *, is_warning: bool = False) -> Iterator[RecordEvent]:
    if member.told != text:
        member.told = text
        yield RecordEvent(member.pod.uid, member.key, text, is_warning)


# One pod


def _one(state: ClaimState, member: ClaimMember, at_s: float) -> Iterator[ClaimInstruction | UnfitAllocation]:
    """What does not fit of what it has; nothing where it only lacks something. Raises _Blocked."""
    pod, why = member.pod, member.claimant.member
    if isinstance(why, IntentRefusal):
        is_quiet = why.needs is not None
        raise _Blocked(
            f"not placed: {why}", is_warning=True, is_released=member.claimant.is_released, is_quiet=is_quiet
        )
    others = [gate for gate in pod.gates if gate != GATE]
    if others and pod.is_gated:
        raise _Blocked(f"waits for the gates of others: {', '.join(others)}", is_quiet=True)
    claims = _claims(state.book, member)
    if pod.node_name:
        yield from _astray(state, member, claims)
        return
    ours = [
        found
        for found in claims
        if is_own_allocation(allocation_results(found)) and found["metadata"]["uid"] not in state.book.decided
    ]
    node_name = next((node for found in ours if (node := state.book.node_of(found))), "")
    if not node_name:
        if member.plan is not None and not pod.is_gated and not _has_ours(state.book, claims):
            yield from _stuck(state, member, member.plan.node_name, at_s)
        return
    reason = _misfit(state, member, ours, node_name, at_s)
    if not reason:
        return
    if any(state.book.is_reserved(found, but=pod.uid) for found in ours):
        raise _Blocked(f"its claim is in use on {node_name}, and {reason}", is_warning=True)
    if not pod.is_gated:
        member.settled_s = at_s + state.settings.settle_s
    for found in ours:
        yield UnfitAllocation(found, reason)


def _claims(book: ClaimStore, member: ClaimMember) -> list[Body]:
    """The claims of a pod, all of them made and understood."""
    found: list[Body] = []
    for one in member.pod.claims:
        if not one.claim_name:
            of = f" of template {one.template_name}" if one.template_name else ""
            raise _Blocked(f"waits for its claim {one.name}{of} to be made", is_quiet=True)
        claim = book.claims.get(PodKey(member.pod.namespace, one.claim_name))
        if claim is None:
            raise _Blocked(f"waits for ResourceClaim {one.claim_name}, which is not there", is_quiet=True)
        metadata = claim["metadata"]
        if metadata.get("deletionTimestamp"):
            raise _Blocked(f"ResourceClaim {one.claim_name} is being deleted", is_quiet=True)
        if one.template_name and all(owner["uid"] != member.pod.uid for owner in metadata.get("ownerReferences") or ()):
            raise _Blocked(f"ResourceClaim {one.claim_name} was made for another pod; delete it", is_warning=True)
        read = book.parsed_claim(claim)
        if isinstance(read, ClaimRejection):
            text = f"not placed: ResourceClaim {one.claim_name} {read}"
            raise _Blocked(text, is_warning=True, is_released=member.claimant.is_released)
        found.append(claim)
    return found


def _has_ours(book: ClaimStore, claims: Iterable[Body]) -> bool:
    return any(isinstance(read := book.parsed_claim(found), ParsedClaim) and read.is_ours for found in claims)


def _astray(state: ClaimState, member: ClaimMember, claims: Iterable[Body]) -> Iterator[ClaimInstruction]:
    """A pod that was bound while its claim was given to it elsewhere cannot start."""
    assert state.epoch is not None
    node_name = member.pod.node_name
    for found in claims:
        at = state.book.node_of(found)
        if is_own_allocation(allocation_results(found)) and at != node_name and not member.pod.is_deleting:
            why = f"bound to {node_name}, and its claim {found['metadata']['name']} is on {at}"
            if member.pod.owner is not None:
                yield RecreatePod(member.pod.uid, member.key, state.epoch, why)
            else:
                yield from _event_if_new(member, f"{why}; delete it and create it again", is_warning=True)
            return


def _stuck(state: ClaimState, member: ClaimMember, node_name: str, at_s: float) -> Iterator[ClaimInstruction]:
    """A pod that had to be pinned and cannot be scheduled there is made anew, more and more rarely."""
    assert state.epoch is not None
    since_s = member.unscheduled_s
    owner = member.pod.owner
    if since_s is None or at_s - since_s < state.settings.unbound_s:
        return
    why = f"pinned to {node_name}, where kube-scheduler cannot put it: {member.pod.unscheduled_message}"
    if owner is None:
        yield from _event_if_new(member, f"{why}; delete it and create it again", is_warning=True)
    elif state.watchdog.may_recreate(owner.uid, at_s - since_s, at_s):
        state.watchdog.record_recreation(owner.uid, at_s - since_s, at_s)
        member.unscheduled_s = at_s
        yield RecreatePod(member.pod.uid, member.key, state.epoch, why)


def _misfit(state: ClaimState, member: ClaimMember, ours: Iterable[Body], node_name: str, at_s: float) -> str:
    """Why a pod cannot stay where its devices are; empty where it can."""
    reason = state.room.closed_reason(node_name) or find_unmet_rule(member.pod.constraint, state.room.nodes[node_name])
    if reason:
        return reason
    pool = state.pools.get_pool(DRIVER_NAME, node_name)
    if pool is None and node_name not in state.pools.node_names(DRIVER_NAME):
        return f"no devices of {node_name} are published any more"
    for one in (result for found in ours for result in allocation_results(found)) if pool is not None else ():
        assert pool is not None
        offer = pool.offers.get(one.device)
        if offer is None or offer.is_closed:
            return f"device {one.device} of {node_name} {'is no more' if offer is None else 'is not well'}"
    since_s = member.unscheduled_s
    if since_s is not None and at_s - since_s >= state.settings.unbound_s:
        member.avoid[node_name] = at_s + state.settings.avoid_s
        return f"kube-scheduler cannot put it on {node_name}: {member.pod.unscheduled_message}"
    return ""


def _lacks(state: ClaimState, member: ClaimMember) -> bool:
    """Whether a pod without our gate has a claim of ours that holds nothing, or whose allocation was not seen."""
    for key in state.book.claims_of(member.pod.uid):
        found = state.book.claims.get(key)
        if found is None:
            continue
        if found["metadata"]["uid"] in state.book.decided:
            return True
        read = state.book.parsed_claim(found)
        if isinstance(read, ParsedClaim) and read.is_ours and not state.book.is_allocated(found):
            return True
    return False


# All pods that lack something


def _unit_demand(
    state: ClaimState, unit: ClaimUnit, todo: list[ClaimMember], at_s: float
) -> Iterator[ClaimInstruction | ClaimDemand | UnfitAllocation]:
    wanted = ClaimDemand(unit)
    for members in _components(state.book, todo):
        try:
            part = _part(state, wanted, members, at_s)
        except _Blocked as error:
            yield from _event_if_new(members[0], str(error), is_warning=error.is_warning)
            return
        if part is None:
            assert state.epoch is not None
            for one in members:
                if one.pod.is_gated:
                    why = "its claims are kube-scheduler's to allocate"
                    yield RemoveGate(one.pod.uid, one.key, one.pod.resource_version, state.epoch, why)
            continue
        wanted.parts.append(part)
    if wanted.parts:
        yield wanted


def _components(book: ClaimStore, members: Iterable[ClaimMember]) -> list[list[ClaimMember]]:
    """Pods that share claims, directly or by way of others."""
    groups: list[tuple[set[PodKey], list[ClaimMember]]] = []
    for member in members:
        keys, together = set(book.claims_of(member.pod.uid)), [member]
        apart = []
        for other in groups:
            if keys & other[0]:
                keys |= other[0]
                together = [*other[1], *together]
            else:
                apart.append(other)
        groups = [*apart, (keys, together)]
    return [together for _, together in groups]


def _part(state: ClaimState, wanted: ClaimDemand, members: list[ClaimMember], at_s: float) -> _Part | None:
    """What pods of one node lack; None where nothing of it is ours to say."""
    book = state.book
    nodes = {one.pod.node_name for one in members} - {""}
    lacking: dict[PodKey, ClaimRequest] = {}
    is_judged = False
    for key in dict.fromkeys(key for one in members for key in book.claims_of(one.pod.uid)):
        found = book.claims.get(key)
        read = None if found is None else book.parsed_claim(found)
        if found is None or not isinstance(read, ParsedClaim):
            continue
        if book.is_allocated(found):
            is_judged = is_judged or read.is_ours
            nodes.add(book.node_of(found))
        elif read.is_ours or (read.driver and not state.pools.is_network_attached(read.driver)):
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
    wanted.burdens[token] = BundleLoad(pods, frozenset() if node_name else avoid)
    kind = (
        tuple((one.variants, one.same) for one in lacking.values()),
        avoid,
        tuple((pod.constraint, pod.requested.cpu_milli, pod.requested.memory_bytes) for pod in pods),
    )
    group = wanted.unit.name if wanted.unit.size > 1 else ""
    bundle = ClaimBundle(claims=tuple(lacking.values()), node_name=node_name, group=group, kind=kind, token=token)
    return _Part(tuple(members), bundle, node_name)


def separate_demands(wanted: Iterable[ClaimDemand], later: dict[str, None]) -> list[ClaimDemand]:
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
