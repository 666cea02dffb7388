"""The claim allocator (mode `dra`): turns pod, claim and slice events into allocations and gate removals.

Level-triggered, like the gate. A grant writes the claims' allocations, then removes the gates; pods are not pinned.

    waiting --claims made, devices free--> granted --kube-scheduler--> bound
    granted --node closed, device gone, unscheduled--> freed --settled--> granted elsewhere

A freed claim rests for `settle_s`, so that a binding under way fails. The API server does not compare claims, so only
the leader allocates, after it has read all claims in its term; of two claims that hold one device the newest that
nobody runs on is freed.
"""

from collections.abc import Iterable, Iterator

from eelgrid_controller.engines.kubernetes.claims.allocation import BundleAllocation, ClusterCapacity, allocate_claims
from eelgrid_controller.engines.kubernetes.claims.demand import (
    ClaimAllocatorSettings,
    ClaimDemand,
    ClaimMember,
    ClaimState,
    ClaimStore,
    ClaimUnit,
    UnfitAllocation,
    claim_key,
    count_claim_gpus,
    evaluate_unit,
    event_if_new,
    find_conflicting_claim,
    is_own_allocation,
    orphaned_allocations,
    separate_demands,
)
from eelgrid_controller.engines.kubernetes.claims.device_pools import DRIVER_NAME, DevicePools, allocation_results
from eelgrid_controller.engines.kubernetes.claims.events import (
    Body,
    ClaimDeallocation,
    ClaimDeleted,
    ClaimEvent,
    ClaimGpusReported,
    ClaimGrant,
    ClaimInstruction,
    ClaimNodeDeleted,
    ClaimNodeUpdated,
    ClaimPodUpdated,
    ClaimsListed,
    ClaimsSynced,
    ClaimStatusWrite,
    ClaimUpdated,
    DeallocationFailed,
    DeviceClassDeleted,
    DeviceClassUpdated,
    GrantFailed,
    GrantWritten,
    PodRelease,
    ResourceSliceDeleted,
    ResourceSliceUpdated,
)
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey, group_key
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    GateTicked,
    LeadershipAcquired,
    LeadershipLost,
    PodDeleted,
    RecordEvent,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    CLAIM_WORKLOAD_PREFIX,
    PodPlan,
    format_plan,
    plan_for_pod,
)


def build_grant(state: ClaimState, wanted: ClaimDemand, given: Iterable[BundleAllocation]) -> ClaimGrant:
    """Everything that is written for a unit."""
    assert state.epoch is not None
    answers = iter(given)
    writes: dict[str, ClaimStatusWrite] = {}
    releases: list[PodRelease] = []
    for part in wanted.parts:
        node_name = part.node_name if part.bundle is None else next(answers).node_name
        for member in part.members:
            has_ours = False
            devices: list[str] = []
            for key in state.book.claims_of(member.pod.uid):
                found = state.book.claims.get(key)
                if found is None:
                    continue
                uid = found["metadata"]["uid"]
                held = state.pools.allocation_of(uid)
                has_ours = has_ours or is_own_allocation(held)
                devices += [one.device for one in held if one.driver == DRIVER_NAME]
                decided = state.book.decided.get(uid)
                if decided is not None:
                    status = _with_reservation(member, found, decided.status)
                    writes[uid] = ClaimStatusWrite(
                        uid, key, {"metadata": found["metadata"], "spec": found["spec"], "status": status}
                    )
            if not member.pod.node_name:
                releases.append(_release(state, member, node_name, devices, is_pinned=not has_ours))
    return ClaimGrant(wanted.unit.name, state.epoch, tuple(writes.values()), tuple(releases))


def _with_reservation(member: ClaimMember, found: Body, status: Body) -> Body:
    """The reservation that kube-scheduler would add, for a claim that is this pod's alone."""
    owners = {one["uid"] for one in found["metadata"].get("ownerReferences") or ()}
    if owners != {member.pod.uid}:
        return status
    pod = member.pod
    return {**status, "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid}]}


def _release(
    state: ClaimState, member: ClaimMember, node_name: str, devices: list[str], *, is_pinned: bool
) -> PodRelease:
    assert state.epoch is not None
    pod = member.pod
    member.released_version = pod.resource_version
    if member.unscheduled_s is not None:
        # From now on it waits for another place.
        member.unscheduled_s = None
    plan = PodPlan(
        state.epoch, f"{CLAIM_WORKLOAD_PREFIX}{pod.uid}", 0, node_name, profile=",".join(devices), uid=pod.uid
    )
    is_new = is_pinned and pod.is_gated
    return PodRelease(pod.uid, member.key, pod.resource_version, node_name, format_plan(plan), is_new)


def surrendered_claims(book: ClaimStore, wanted: ClaimDemand) -> Iterator[Body]:
    """Unused allocations of a gang that has no room for all its members."""
    if wanted.unit.size <= 1:
        return
    for member in wanted.members:
        for key in book.claims_of(member.pod.uid) if member.pod.is_gated else ():
            found = book.claims.get(key)
            if (
                found is not None
                and is_own_allocation(allocation_results(found))
                and not book.is_reserved(found, but=member.pod.uid)
            ):
                yield found


_LOOK_AGAIN_S = 0.2
_HELD = ("allocation", "reservedFor", "devices")


class ClaimAllocator:
    """Allocates the claims of one cluster."""

    def __init__(self, settings: ClaimAllocatorSettings) -> None:
        self.settings = settings
        self.epoch: int | None = None
        self.pools = DevicePools()
        self.book = ClaimStore(self.pools)
        self.room = ClusterCapacity()
        self.units: dict[str, ClaimUnit] = {}
        self.watchdog = UnboundPodWatchdog(unbound_s=settings.unbound_s)  # of pods that had to be pinned
        self.conflicts = 0
        self._unit_of: dict[str, str] = {}
        self._marked: dict[str, None] = {}
        self._starved: dict[str, None] = {}  # units that have no room; looked at again when something comes free
        self._orphans: dict[str, float] = {}
        self._freeing: dict[str, str] = {}  # uid -> version that is being freed
        self._suspects: dict[str, None] = {}  # nodes on which more may be held than there is
        self._sliced: dict[str, int] = {}
        self._resliced: dict[str, None] = {}
        self._is_tick = False
        self._is_synced = False
        self._is_fresh = False  # all claims were read in this term
        self._tells: list[RecordEvent] = []

    def on_events(self, events: Iterable[ClaimEvent], at_s: float, stamp: str) -> list[ClaimInstruction]:
        """Apply events and return the instructions that follow; `stamp` is the time in RFC 3339."""
        for event in events:
            self._apply(event, at_s)
        if not self._is_synced:
            return []
        told: list[ClaimInstruction] = list(self._slices())
        if self.epoch is not None and self._is_fresh:
            told += self._conflicts()
            told += self._evaluate_marked(at_s, stamp)
        tells, self._tells = self._tells, []
        return [*told, *tells]

    # Events

    def _apply(self, event: ClaimEvent, at_s: float) -> None:
        match event:
            case ClaimPodUpdated():
                self._on_pod_updated(event, at_s)
            case PodDeleted(uid):
                self._gone(uid)
            case ClaimNodeUpdated(node):
                self.room.nodes[node.name] = node
                self._mark_all()
            case ClaimNodeDeleted(name):
                self.room.nodes.pop(name, None)
                self._mark_all()
            case ClaimUpdated(found):
                self._claim(found, at_s)
            case ClaimDeleted(found):
                key = claim_key(found)
                running = [uid for uid in self.book.users.get(key, ()) if self._is_running(uid)]
                self.book.remove_claim(found, running)
                self._marked.update(self._starved)
                self._mark_users(key)
            case ResourceSliceUpdated(name, spec):
                self.pools.put_slice(name, spec)
                self._slice(spec)
            case ResourceSliceDeleted(name):
                self._slice(self.pools.remove_slice(name))
            case DeviceClassUpdated(found):
                self.book.classes[found["metadata"]["name"]] = found
                self.book.invalidate_requests()
                self._mark_all()
            case DeviceClassDeleted(name):
                self.book.classes.pop(name, None)
                self.book.invalidate_requests()
            case ClaimsSynced():
                self._is_synced = True
                self._marked.update(dict.fromkeys(self.units))
            case LeadershipAcquired() | LeadershipLost() | ClaimsListed():
                self._term(event, at_s)
            case GrantWritten(name):
                self._on_grant_ended(name, 0.0)
            case GrantFailed(name, uid, failure, why):
                self._grant_failed(name, uid, failure, why, at_s)
            case DeallocationFailed(uid):
                self._freeing.pop(uid, None)
            case GateTicked():
                self._is_tick = True
                self._mark_all()

    def _term(self, event: LeadershipAcquired | LeadershipLost | ClaimsListed, at_s: float) -> None:
        match event:
            case LeadershipAcquired(epoch) if epoch != self.epoch:
                self.epoch, self._is_fresh = epoch, False
            case LeadershipLost():
                self.epoch, self._is_fresh = None, False
                for unit in self.units.values():
                    unit.is_granting = False
                # What was decided and not seen is judged by the list that the next term begins with.
            case ClaimsListed(epoch, claims) if epoch == self.epoch and not self._is_fresh:
                for found in claims:
                    self._claim(found, at_s)
                for uid in list(self.book.decided):
                    self.book.revert_decision(uid)
                self._freeing.clear()
                self._is_fresh = True
                self._marked.update(dict.fromkeys(self.units))

    def _on_pod_updated(self, event: ClaimPodUpdated, at_s: float) -> None:
        self.room.put_pod(event.uid, event.found, event.where)
        claimant = event.claimant
        if claimant is None:
            self._leave(event.uid)
            return
        pod = claimant.pod
        before = self._unit_of.get(pod.uid)
        name = group_key(pod, claimant.member)
        if before is not None and before != name:
            self._leave(pod.uid)
        unit = self.units.setdefault(name, ClaimUnit(name))
        member = unit.members.get(pod.uid)
        if member is None:
            member = unit.members[pod.uid] = ClaimMember(claimant, at_s)
            self._unit_of[pod.uid] = name
        member.claimant = claimant
        member.plan = plan_for_pod(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
        # Since when is a matter of its present place: a release begins anew.
        is_stuck = pod.unscheduled == "Unschedulable" and not pod.gates and not pod.node_name
        member.unscheduled_s = (member.unscheduled_s or at_s) if is_stuck else None
        self.book.put_pod(pod)
        self._marked[name] = None

    def _gone(self, uid: str) -> None:
        self.room.remove_pod(uid)
        self.book.remove_pod(uid)
        self._leave(uid)
        self._marked.update(self._starved)

    def _leave(self, uid: str) -> None:
        name = self._unit_of.pop(uid, None)
        if name is not None:
            unit = self.units[name]
            for key in self.book.claims_of(uid):
                self._mark_users(key)
            del unit.members[uid]
            self.book.remove_pod(uid)
            if unit.members:
                self._marked[name] = None
            else:
                del self.units[name]
                self._starved.pop(name, None)

    def _claim(self, found: Body, at_s: float) -> None:
        metadata = found["metadata"]
        key = claim_key(found)
        before = self.book.claims.get(key)
        was = self.book.node_of(before) if before is not None else ""
        is_lost = self.book.put_claim(found)
        if not allocation_results(found) and before is not None and allocation_results(before):
            self._marked.update(self._starved)
            self._on_claim_freed(key, at_s)
        if metadata["uid"] in self._freeing:
            if self._freeing[metadata["uid"]] != metadata["resourceVersion"]:
                del self._freeing[metadata["uid"]]
        elif is_lost and was:
            # kube-scheduler took it back: the node does not do for the pod.
            for uid in self.book.users.get(key, ()):
                self.units[self._unit_of[uid]].members[uid].avoid[was] = at_s + self.settings.avoid_s
        node_name = self.book.node_of(found)
        pool = self.pools.get_pool(DRIVER_NAME, node_name) if node_name else None
        if pool is not None and pool.is_overdrawn:
            self._suspects[node_name] = None
        self._mark_users(key)

    def _slice(self, spec: Body | None) -> None:
        node_name = (spec or {}).get("nodeName")
        if spec is not None and node_name and spec["driver"] == DRIVER_NAME:
            self._resliced[node_name] = None
            self._suspects[node_name] = None
        self._mark_all()

    def _grant_failed(self, name: str, uid: str, failure: WriteFailure, why: str, at_s: float) -> None:
        unit = self.units.get(name)
        if unit is None:
            return
        # Where a claim was not written, none of the pods was let go.
        for member in [unit.members[uid]] if uid in unit.members else unit.members.values():
            member.released_version = ""
        waits = {WriteFailure.BUSY: self.settings.busy_s, WriteFailure.FORBIDDEN: self.settings.forbidden_s}
        wait_s = waits.get(failure, _LOOK_AGAIN_S)
        if failure in (WriteFailure.INVALID, WriteFailure.FORBIDDEN):
            # The server has judged: it was not written.
            self.book.revert_decision(uid)
            wait_s = max(wait_s, self.settings.busy_s)
            for member in unit.active_members:
                self.room.reserve_pod(member.pod, "")
            for member in unit.alive_by_name[:1]:
                self._tells += event_if_new(member, f"cannot be given its devices: {why}", is_warning=True)
        self._on_grant_ended(name, at_s + wait_s)

    def _on_grant_ended(self, name: str, retry_s: float) -> None:
        unit = self.units.get(name)
        if unit is not None:
            unit.is_granting = False
            unit.retry_s = max(unit.retry_s, retry_s)
            self._marked[name] = None

    def _on_claim_freed(self, key: PodKey, at_s: float) -> None:
        """A claim was freed: bindings of its pods that are under way are to fail before it is given others."""
        for uid in self.book.users.get(key, ()):
            member = self.units[self._unit_of[uid]].members[uid]
            self.room.reserve_pod(member.pod, "")
            if not member.pod.is_gated:
                member.settled_s = max(member.settled_s, at_s + self.settings.settle_s)

    def _is_running(self, uid: str) -> bool:
        name = self._unit_of.get(uid)
        member = None if name is None else self.units[name].members[uid]
        return member is not None and bool(member.pod.node_name) and not member.pod.is_terminal

    def _mark_users(self, key: PodKey) -> None:
        for uid in self.book.users.get(key, ()):
            if uid in self._unit_of:
                self._marked[self._unit_of[uid]] = None

    def _mark_all(self) -> None:
        """Units of which a pod is not bound; those that run are looked at when they, or their claims, change."""
        for name, unit in self.units.items():
            if any(not member.pod.node_name for member in unit.members.values()):
                self._marked[name] = None

    # What is done

    def _slices(self) -> Iterator[ClaimGpusReported]:
        """GPUs that are published as ResourceSlices are given by claims alone."""
        resliced, self._resliced = self._resliced, {}
        for name in resliced:
            count = count_claim_gpus(self.pools, name)
            if count is not None and self._sliced.get(name, 0) != count:
                self._sliced[name] = count
                yield ClaimGpusReported(name, count)

    def _conflicts(self) -> Iterator[ClaimDeallocation]:
        """One claim for each node on which more is held than there is."""
        suspects, self._suspects = self._suspects, {}
        for name in suspects:
            found = find_conflicting_claim(self.pools, self.book, name, self._is_running)
            if found is not None:
                self.conflicts += 1
                yield from self._free(found, "its devices are another's, too")

    def _evaluate_marked(self, at_s: float, stamp: str) -> Iterator[ClaimInstruction]:
        marked, self._marked = self._marked, {}
        self._starved = {name: None for name in self._starved if name not in marked and name in self.units}
        wanted: list[ClaimDemand] = []
        for name in marked:
            unit = self.units.get(name)
            if unit is None or unit.is_granting or unit.retry_s > at_s:
                continue
            for told in evaluate_unit(self, unit, at_s):
                match told:
                    case ClaimDemand():
                        wanted.append(told)
                    case RecordEvent():
                        self._tells.append(told)
                    case UnfitAllocation(found, why):
                        yield from self._free(found, why)
                    case _:
                        yield told
        wanted.sort(key=lambda one: one.sort_key)
        yield from self._grant_demands(separate_demands(wanted, self._marked), stamp)
        if self._is_tick:
            self._is_tick = False
            for found in orphaned_allocations(self.book, self._orphans, at_s, self.settings.orphan_s):
                yield from self._free(found, "no pod needs it")

    def _grant_demands(self, wanted: list[ClaimDemand], stamp: str) -> Iterator[ClaimInstruction]:
        assert self.epoch is not None
        self.room.burdens = {token: burden for one in wanted for token, burden in one.burdens.items()}
        answers = iter(allocate_claims(self.pools, [bundle for one in wanted for bundle in one.bundles], self.room))
        for one in wanted:
            found = [next(answers) for _ in one.bundles]
            given = [answer for answer in found if isinstance(answer, BundleAllocation)]
            if len(given) < len(found):
                self._starved[one.unit.name] = None
                refused = next(answer for answer in found if not isinstance(answer, BundleAllocation))
                for member in one.members[:1]:
                    self._tells += event_if_new(member, f"waits: {refused.reason}")
                for claim in surrendered_claims(self.book, one):
                    yield from self._free(claim, "its gang has no room")
                continue
            for answer in given:
                self.book.record_decision(answer, stamp)
            one.unit.is_granting = True
            yield build_grant(self, one, given)

    def _free(self, found: Body, why: str) -> Iterator[ClaimDeallocation]:
        assert self.epoch is not None
        metadata = found["metadata"]
        version = metadata["resourceVersion"]
        if self._freeing.get(metadata["uid"]) != version and is_own_allocation(allocation_results(found)):
            self._freeing[metadata["uid"]] = version
            status = {key: value for key, value in found["status"].items() if key not in _HELD}
            body = {"metadata": metadata, "spec": found["spec"], "status": status}
            yield ClaimDeallocation(metadata["uid"], claim_key(found), body, self.epoch, why)
