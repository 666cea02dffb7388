"""Claims, the pods that use them, and decisions that are not observed yet.

A decision counts as observed until another version of the claim is; until then only the same decision may be sent
again. Also finds allocations without users, and claims that hold one device twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.claims.allocation import BundleAllocation, ClaimRequest, allocation_body
from eelgrid_controller.engines.kubernetes.claims.device_pools import (
    DRIVER_NAME,
    AllocationResult,
    DevicePool,
    DevicePools,
    allocation_results,
)
from eelgrid_controller.engines.kubernetes.claims.events import Body, Claimant
from eelgrid_controller.engines.kubernetes.claims.requests import (
    ClaimRejection,
    DeviceClasses,
    ParsedClaim,
    parse_claim,
)
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.owners import GangMembership
from eelgrid_controller.engines.kubernetes.pods.gate_events import PodKey
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan


@dataclass(slots=True)
class ClaimMember:
    """One pod."""

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
        """It."""
        return self.claimant.pod

    @property
    def key(self) -> PodKey:
        """Its name."""
        return PodKey(self.pod.namespace, self.pod.name)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to be gone without having been anywhere."""
        return self.pod.is_terminal or (self.pod.is_deleting and not self.pod.node_name)


@dataclass(slots=True)
class ClaimUnit:
    """A pod, or a gang."""

    name: str
    members: dict[str, ClaimMember] = field(default_factory=dict)
    is_granting: bool = False
    retry_s: float = 0.0

    @property
    def active_members(self) -> list[ClaimMember]:
        """Members that have not ended, by name."""
        return sorted((one for one in self.members.values() if not one.is_over), key=lambda one: (one.key, one.pod.uid))

    @property
    def size(self) -> int:
        """How many members it is to have."""
        found = [one.claimant.member for one in self.members.values()]
        return max((one.size for one in found if isinstance(one, GangMembership)), default=1)


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
        """A pod that is no more."""
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
        key, uid = PodKey(metadata["namespace"], metadata["name"]), metadata["uid"]
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
        key, uid = PodKey(metadata["namespace"], metadata["name"]), metadata["uid"]
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
        """What classes say is read anew."""
        self._read.clear()

    def parsed_claim(self, found: Mapping[str, Any]) -> ParsedClaim | ClaimRejection:
        """What a claim asks for."""
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
        """Claims that hold devices of ours, as they were seen."""
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
        if _is_contended(pool, allocation_results(claim)) and not any(map(is_running, book.users.get(_key(claim), ()))):
            return claim
    return None


def orphaned_allocations(book: ClaimStore, since: dict[str, float], at_s: float, orphan_s: float) -> Iterator[Body]:
    """Allocations that nobody has needed for so long; `since` keeps from when on."""
    for found in list(book.allocated_claims()):
        uid = found["metadata"]["uid"]
        if book.users.get(_key(found)) or book.is_reserved(found):
            since.pop(uid, None)
        elif since.setdefault(uid, at_s) + orphan_s <= at_s:
            yield found


def _key(found: Body) -> PodKey:
    return PodKey(found["metadata"]["namespace"], found["metadata"]["name"])


def _is_contended(pool: DevicePool, results: Iterable[AllocationResult]) -> bool:
    """Whether somebody else holds something of this, too."""
    for one in results:
        offer = pool.offers.get(one.device)
        if pool.taken.get(one.device, 0) > 1:
            return True
        if offer is not None and any(pool.free.get(key, 0) < 0 for key, _ in offer.takes):
            return True
    return False
