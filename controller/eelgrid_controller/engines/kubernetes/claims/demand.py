"""Claims, the pods that use them, and what a unit of mode `dra` lacks.

`ClaimStore` holds claims and the decisions that are not observed yet: a decision counts as observed when another version
of the claim is; until then only the same decision may be sent again. It also finds allocations without users, and
claims that hold one device twice.

`evaluate_unit` says what a unit's pods hold, what they lack, and what no longer fits. Pods that share a claim end on one
node and are evaluated together. A pod that has only claims of other drivers is pinned to a node where their devices are
free; unlike an allocation, that pin cannot be taken back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.engines.kubernetes.claims.allocation import (
    BundleAllocation,
    BundleLoad,
    ClaimBundle,
    ClaimRequest,
    ClusterCapacity,
    allocation_body,
)
from eelgrid_controller.engines.kubernetes.claims.device_pools import (
    DRIVER_NAME,
    AllocationResult,
    DevicePool,
    DevicePools,
    allocation_results,
)
from eelgrid_controller.engines.kubernetes.claims.events import Body, Claimant, ClaimInstruction
from eelgrid_controller.engines.kubernetes.claims.requests import (
    ClaimRejection,
    DeviceClasses,
    ParsedClaim,
    parse_claim,
)
from eelgrid_controller.engines.kubernetes.model.node_affinity import find_unmet_rule
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import (
    GangMembership,
    GroupMember,
    IntentRefusal,
    PodGroup,
    PodKey,
)
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_controller.engines.kubernetes.pods.gate_events import RecordEvent, RecreatePod, RemoveGate
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import CLAIM_WORKLOAD_PREFIX, PodPlan


@dataclass(slots=True)
class ClaimMember(GroupMember):
    """A pod that is placed by its claims, and what was last done about it."""

    claimant: Claimant
    seen_s: float = 0.0  # first
    plan: PodPlan | None = None
    told: str = ""
    released_version: str = ""  # the version that its release was sent for
    unscheduled_s: float | None = None  # since when kube-scheduler says so
    settled_s: float = 0.0  # not decided anew before
    avoid: dict[str, float] = field(default_factory=dict)  # node -> until when

    @property
    def pod(self) -> Pod:
        """The pod as the allocator saw it last."""
        return self.claimant.pod

    @property
    def min_members(self) -> int:
        """The size of its gang; 1 where that cannot be said."""
        found = self.claimant.member
        return found.size if isinstance(found, GangMembership) else 1


@dataclass(slots=True)
class ClaimUnit(PodGroup[ClaimMember]):
    """A group whose claims are allocated together."""

    is_granting: bool = False
    retry_s: float = 0.0

    @property
    def alive_by_name(self) -> list[ClaimMember]:
        """Members that have not ended, by name."""
        return sorted(self.active_members, key=lambda one: (one.key, one.pod.uid))


class ClaimDecision(NamedTuple):
    """What a claim is to hold, decided against one version of it."""

    version: str
    asked: ClaimRequest
    node_name: str
    status: Mapping[str, Any]


class ClaimStore:
    """All claims, and who needs them."""

    def __init__(self, pools: DevicePools) -> None:
        self.claims: dict[PodKey, Mapping[str, Any]] = {}
        self.decided: dict[str, ClaimDecision] = {}  # by the claim's uid
        self.users: dict[PodKey, dict[str, None]] = {}  # pods by claim
        self.classes: dict[str, Mapping[str, Any]] = {}
        self._pools = pools
        self._needs: dict[str, tuple[PodKey, ...]] = {}  # claims by pod
        self._ghosts: dict[str, set[str]] = {}  # deleted claims of pods that run: uid -> pods
        self._read: dict[str, ParsedClaim | ClaimRejection] = {}

    # Pods

    def put_pod(self, pod: Pod) -> None:
        """A pod as it is now."""
        needs = tuple(
            PodKey(pod.namespace, one.claim_name) for one in pod.claims if one.claim_name and not pod.is_terminal
        )
        if self._needs.get(pod.uid) == needs:
            return
        self._remove_needs(pod.uid)
        if needs:
            self._needs[pod.uid] = needs
        for key in needs:
            self.users.setdefault(key, {})[pod.uid] = None
        if pod.is_terminal:
            self._lay(pod.uid)

    def remove_pod(self, uid: str) -> None:
        """A pod was deleted."""
        self._remove_needs(uid)
        self._lay(uid)

    def claims_of(self, uid: str) -> Sequence[PodKey]:
        """The claims of a pod."""
        return self._needs.get(uid, ())

    def _remove_needs(self, uid: str) -> None:
        for key in self._needs.pop(uid, ()):
            users = self.users[key]
            users.pop(uid, None)
            if not users:
                del self.users[key]

    def _lay(self, uid: str) -> None:
        for claim, users in list(self._ghosts.items()):
            users.discard(uid)
            if not users:
                del self._ghosts[claim]
                self._pools.set_allocation(claim, ())

    # Claims

    def put_claim(self, found: Mapping[str, Any]) -> bool:
        """A claim as it is now; whether it lost what it held though nobody here decided so."""
        metadata = found["metadata"]
        key, uid = claim_key(found), metadata["uid"]
        known = self.claims.get(key)
        if known is not None and known["metadata"]["uid"] == uid and not _is_newer(found, known):
            return False
        if known is not None and known["metadata"]["uid"] != uid:
            self.remove_claim(known, running=())
        self.claims[key] = found
        decided = self.decided.get(uid)
        if decided is not None and decided.version != metadata["resourceVersion"]:
            del self.decided[uid]
        results = allocation_results(found)
        is_lost = not results and bool(allocation_results(known or {})) and decided is None
        if uid not in self.decided:
            self._pools.set_allocation(uid, results)
        return is_lost

    def remove_claim(self, found: Mapping[str, Any], running: Iterable[str]) -> None:
        """A claim that is no more; what it held is free when none of these pods runs any more."""
        metadata = found["metadata"]
        key, uid = claim_key(found), metadata["uid"]
        known = self.claims.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.claims[key]
        self.decided.pop(uid, None)
        self._read.pop(uid, None)
        ghosts = set(running)
        if ghosts and self._pools.allocation_of(uid):
            self._ghosts[uid] = ghosts
        else:
            self._pools.set_allocation(uid, ())

    def invalidate_requests(self) -> None:
        """A DeviceClass changed: claims are parsed again."""
        self._read.clear()

    def parsed_claim(self, found: Mapping[str, Any]) -> ParsedClaim | ClaimRejection:
        """Parse what a claim requests."""
        uid = found["metadata"]["uid"]
        known = self._read.get(uid)
        if known is None:
            classes: DeviceClasses = self.classes
            known = self._read[uid] = parse_claim(found, classes)
        return known

    def node_of(self, found: Mapping[str, Any]) -> str:
        """The node on which a claim holds devices, or is about to; empty for none."""
        decided = self.decided.get(found["metadata"]["uid"])
        if decided is not None:
            return decided.node_name
        return next(filter(None, (self._pools.node_of(one.driver, one.pool) for one in allocation_results(found))), "")

    def is_allocated(self, found: Mapping[str, Any]) -> bool:
        """Whether a claim holds devices, or is about to."""
        return found["metadata"]["uid"] in self.decided or bool((found.get("status") or {}).get("allocation"))

    def is_reserved(self, found: Mapping[str, Any], *, but: str = "") -> bool:
        """Whether pods, other than this one, may be using it."""
        return any(one.get("uid") != but for one in (found.get("status") or {}).get("reservedFor") or ())

    def record_decision(self, given: BundleAllocation, stamp: str) -> None:
        """What claims of ours hold from now on; those of other drivers only keep devices free for them."""
        for asked, results in zip(given.bundle.claims, given.results, strict=True):
            key = PodKey(asked.namespace, asked.name)
            found = self.claims[key]
            if not is_own_allocation(results):
                continue
            status: dict[str, Any] = {**(found.get("status") or {})}
            status["allocation"] = allocation_body(asked, results, given.node_name, stamp)
            self.decided[asked.uid] = ClaimDecision(
                found["metadata"]["resourceVersion"], asked, given.node_name, status
            )

    def revert_decision(self, uid: str) -> None:
        """A decision that was certainly not written."""
        decided = self.decided.pop(uid, None)
        if decided is not None:
            found = self.claims.get(PodKey(decided.asked.namespace, decided.asked.name))
            self._pools.set_allocation(uid, allocation_results(found or {}))

    def allocated_claims(self) -> Iterator[Mapping[str, Any]]:
        """Claims that hold devices of our driver, as last observed."""
        for found in self.claims.values():
            if is_own_allocation(allocation_results(found)):
                yield found


def is_own_allocation(results: Iterable[AllocationResult]) -> bool:
    """Whether an allocation is one that we made."""
    drivers = {one.driver for one in results}
    return drivers == {DRIVER_NAME}


def _is_newer(found: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    new, was = found["metadata"]["resourceVersion"], known["metadata"]["resourceVersion"]
    return int(new) > int(was) if new.isdigit() and was.isdigit() else bool(new != was)


def count_claim_gpus(pools: DevicePools, node_name: str) -> int | None:
    """How many GPUs of a node are given by claims; None while its slices are being written anew."""
    pool = pools.get_pool(DRIVER_NAME, node_name)
    if pool is None:
        return None if node_name in pools.node_names(DRIVER_NAME) else 0
    return len({one.seen.attributes.get((DRIVER_NAME, "parentUUID"), one.counter_set) for one in pool.offers.values()})


def find_conflicting_claim(
    pools: DevicePools, book: ClaimStore, node_name: str, is_running: Callable[[str], bool]
) -> Body | None:
    """Of claims that hold more of a node than there is, the newest that no pod may be running on."""
    pool = pools.get_pool(DRIVER_NAME, node_name)
    if pool is None or not pool.is_overdrawn:
        return None
    holders = pools.claims_holding(DRIVER_NAME, node_name)
    found: list[Body] = [one for one in book.allocated_claims() if one["metadata"]["uid"] in holders]
    found.sort(key=lambda one: (one["status"]["allocation"].get("allocationTimestamp", ""), one["metadata"]["uid"]))
    for claim in reversed(found):
        if _is_contended(pool, allocation_results(claim)) and not any(
            map(is_running, book.users.get(claim_key(claim), ()))
        ):
            return claim
    return None


def orphaned_allocations(book: ClaimStore, since: dict[str, float], at_s: float, orphan_s: float) -> Iterator[Body]:
    """Allocations that nobody has needed for so long; `since` keeps from when on."""
    for found in list(book.allocated_claims()):
        uid = found["metadata"]["uid"]
        if book.users.get(claim_key(found)) or book.is_reserved(found):
            since.pop(uid, None)
        elif since.setdefault(uid, at_s) + orphan_s <= at_s:
            yield found


def claim_key(found: Body) -> PodKey:
    """Namespace and name of a claim."""
    return PodKey(found["metadata"]["namespace"], found["metadata"]["name"])


def _is_contended(pool: DevicePool, results: Iterable[AllocationResult]) -> bool:
    """Whether one of these devices is held twice, or its counters are overdrawn."""
    for one in results:
        offer = pool.offers.get(one.device)
        if pool.taken.get(one.device, 0) > 1:
            return True
        if offer is not None and any(pool.free.get(key, 0) < 0 for key, _ in offer.takes):
            return True
    return False


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
        """The bundles that need devices."""
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
    """A pod cannot proceed; the message is for its users."""

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
    for member in unit.alive_by_name:
        if not is_steered(member):
            continue
        try:
            told = list(_one(state, member, at_s))
        except _Blocked as error:
            is_blocked = is_blocked or member.pod.is_gated
            if error.is_released and member.pod.is_gated:
                yield RemoveGate(member.pod.uid, member.key, member.pod.resource_version, state.epoch, str(error))
            elif not error.is_quiet or at_s - member.seen_s > _PATIENCE_S:
                yield from event_if_new(member, str(error), is_warning=error.is_warning)
            continue
        if told:
            yield from told
            is_blocked = is_blocked or member.pod.is_gated
        elif member.pod.is_gated:
            if member.released_version != member.pod.resource_version:
                gated.append(member)
        elif _lacks(state, member) and (member.pod.node_name or at_s >= member.settled_s):
            todo.append(member)
    if gated and not unit.is_complete:
        yield from event_if_new(
            gated[0], f"waits for its gang: {len(unit.present_members)} of {unit.size} members are present"
        )
    elif not is_blocked:
        todo += gated
    if todo:
        yield from _unit_demand(state, unit, todo, at_s)


def event_if_new(member: ClaimMember, text: str, *, is_warning: bool = False) -> Iterator[RecordEvent]:
    """An Event about a pod, unless the last one said the same."""
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
        raise _Blocked(f"waits for other scheduling gates: {', '.join(others)}", is_quiet=True)
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
            raise _Blocked(f"waits for its claim {one.name}{of} to be created", is_quiet=True)
        claim = book.claims.get(PodKey(member.pod.namespace, one.claim_name))
        if claim is None:
            raise _Blocked(f"waits for ResourceClaim {one.claim_name}, which does not exist", is_quiet=True)
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
            why = f"bound to {node_name}, but its claim {found['metadata']['name']} is on {at}"
            if member.pod.owner is not None:
                yield RecreatePod(member.pod.uid, member.key, state.epoch, why)
            else:
                yield from event_if_new(member, f"{why}; delete it and create it again", is_warning=True)
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
        yield from event_if_new(member, f"{why}; delete it and create it again", is_warning=True)
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
        return f"{node_name} publishes no devices any longer"
    for one in (result for found in ours for result in allocation_results(found)) if pool is not None else ():
        assert pool is not None
        offer = pool.offers.get(one.device)
        if offer is None or offer.is_closed:
            return f"device {one.device} of {node_name} {'is gone' if offer is None else 'is unhealthy'}"
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
            yield from event_if_new(members[0], str(error), is_warning=error.is_warning)
            return
        if part is None:
            assert state.epoch is not None
            for one in members:
                if one.pod.is_gated:
                    why = "its claims are allocated by kube-scheduler"
                    yield RemoveGate(one.pod.uid, one.key, one.pod.resource_version, state.epoch, why)
            continue
        wanted.parts.append(part)
    if wanted.parts:
        yield wanted


def _components(book: ClaimStore, members: Iterable[ClaimMember]) -> list[list[ClaimMember]]:
    """Groups of pods that share claims, directly or through other pods."""
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
