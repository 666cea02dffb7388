"""Pods that are placed by their claims, the claims themselves, and what is known of each.

Owns who needs which claim, what a claim holds and what was decided for it but not seen yet. Must not know
time's rules, nor what is written when.

Theory. A decision is held as if it were seen: its devices are taken at once. It stays so until
another version of the claim is seen, which tells the truth whatever became of the write; until
then the same decision may be sent again and no other, so that a write whose answer was lost
cannot land on top of another one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.claim_events import Claimant, Key
from eelgrid_controller.kubernetes.claim_reading import ClaimRead, ClaimRefused, Classes, read_claim
from eelgrid_controller.kubernetes.claims import Allocation, AskedClaim, allocation_body
from eelgrid_controller.kubernetes.device_pools import DRIVER, Pools, Result, results_of
from eelgrid_controller.kubernetes.owners import Membership
from eelgrid_controller.kubernetes.plans import Plan
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["Book", "Decided", "Member", "Unit"]


@dataclass(slots=True)
class Member:
    """One pod."""

    claimant: Claimant
    seen_s: float = 0.0  # first
    plan: Plan | None = None
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
    def key(self) -> Key:
        """Its name."""
        return Key(self.pod.namespace, self.pod.name)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to be gone without having been anywhere."""
        return self.pod.is_terminal or (self.pod.is_going and not self.pod.node_name)


@dataclass(slots=True)
class Unit:
    """A pod, or a gang."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    is_granting: bool = False
    retry_s: float = 0.0

    @property
    def alive(self) -> list[Member]:
        """Members that have not ended, by name."""
        return sorted((one for one in self.members.values() if not one.is_over), key=lambda one: (one.key, one.pod.uid))

    @property
    def size(self) -> int:
        """How many members it is to have."""
        found = [one.claimant.member for one in self.members.values()]
        return max((one.size for one in found if isinstance(one, Membership)), default=1)


class Decided(NamedTuple):
    """What a claim is to hold, decided against one version of it."""

    version: str
    asked: AskedClaim
    node_name: str
    status: Mapping[str, Any]


class Book:
    """All claims, and who needs them."""

    def __init__(self, pools: Pools) -> None:
        self.claims: dict[Key, Mapping[str, Any]] = {}
        self.decided: dict[str, Decided] = {}  # by the claim's uid
        self.users: dict[Key, dict[str, None]] = {}  # pods by claim
        self.classes: dict[str, Mapping[str, Any]] = {}
        self._pools = pools
        self._needs: dict[str, tuple[Key, ...]] = {}  # claims by pod
        self._ghosts: dict[str, set[str]] = {}  # deleted claims of pods that run: uid -> pods
        self._read: dict[str, ClaimRead | ClaimRefused] = {}

    # Pods

    def need(self, pod: Pod) -> None:
        """A pod as it is now."""
        needs = tuple(
            Key(pod.namespace, one.claim_name) for one in pod.claims if one.claim_name and not pod.is_terminal
        )
        if self._needs.get(pod.uid) == needs:
            return
        self._unneed(pod.uid)
        if needs:
            self._needs[pod.uid] = needs
        for key in needs:
            self.users.setdefault(key, {})[pod.uid] = None
        if pod.is_terminal:
            self._lay(pod.uid)

    def gone(self, uid: str) -> None:
        """A pod that is no more."""
        self._unneed(uid)
        self._lay(uid)

    def needs(self, uid: str) -> Sequence[Key]:
        """The claims of a pod."""
        return self._needs.get(uid, ())

    def _unneed(self, uid: str) -> None:
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
                self._pools.hold(claim, ())

    # Claims

    def seen(self, found: Mapping[str, Any]) -> bool:
        """A claim as it is now; whether it lost what it held though nobody here decided so."""
        metadata = found["metadata"]
        key, uid = Key(metadata["namespace"], metadata["name"]), metadata["uid"]
        known = self.claims.get(key)
        if known is not None and known["metadata"]["uid"] == uid and not _is_newer(found, known):
            return False
        if known is not None and known["metadata"]["uid"] != uid:
            self.removed(known, running=())
        self.claims[key] = found
        decided = self.decided.get(uid)
        if decided is not None and decided.version != metadata["resourceVersion"]:
            del self.decided[uid]
        results = results_of(found)
        is_lost = not results and bool(results_of(known or {})) and decided is None
        if uid not in self.decided:
            self._pools.hold(uid, results)
        return is_lost

    def removed(self, found: Mapping[str, Any], running: Iterable[str]) -> None:
        """A claim that is no more; what it held is free when none of these pods runs any more."""
        metadata = found["metadata"]
        key, uid = Key(metadata["namespace"], metadata["name"]), metadata["uid"]
        known = self.claims.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.claims[key]
        self.decided.pop(uid, None)
        self._read.pop(uid, None)
        ghosts = set(running)
        if ghosts and self._pools.held(uid):
            self._ghosts[uid] = ghosts
        else:
            self._pools.hold(uid, ())

    def class_changed(self) -> None:
        """What classes say is read anew."""
        self._read.clear()

    def read(self, found: Mapping[str, Any]) -> ClaimRead | ClaimRefused:
        """What a claim asks for."""
        uid = found["metadata"]["uid"]
        known = self._read.get(uid)
        if known is None:
            classes: Classes = self.classes
            known = self._read[uid] = read_claim(found, classes)
        return known

    def node_of(self, found: Mapping[str, Any]) -> str:
        """The node on which a claim holds devices, or is about to; empty for none."""
        decided = self.decided.get(found["metadata"]["uid"])
        if decided is not None:
            return decided.node_name
        return next(filter(None, (self._pools.node_of(one.driver, one.pool) for one in results_of(found))), "")

    def is_allocated(self, found: Mapping[str, Any]) -> bool:
        """Whether a claim holds devices, or is about to."""
        return found["metadata"]["uid"] in self.decided or bool((found.get("status") or {}).get("allocation"))

    def is_reserved(self, found: Mapping[str, Any], *, but: str = "") -> bool:
        """Whether pods, other than this one, may be using it."""
        return any(one.get("uid") != but for one in (found.get("status") or {}).get("reservedFor") or ())

    def decide(self, given: Allocation, stamp: str) -> None:
        """What claims of ours hold from now on; those of other drivers only keep devices free for them."""
        for asked, results in zip(given.bundle.claims, given.results, strict=True):
            key = Key(asked.namespace, asked.name)
            found = self.claims[key]
            if not is_ours(results):
                continue
            status: dict[str, Any] = {**(found.get("status") or {})}
            status["allocation"] = allocation_body(asked, results, given.node_name, stamp)
            self.decided[asked.uid] = Decided(found["metadata"]["resourceVersion"], asked, given.node_name, status)

    def undecide(self, uid: str) -> None:
        """A decision that was certainly not written."""
        decided = self.decided.pop(uid, None)
        if decided is not None:
            found = self.claims.get(Key(decided.asked.namespace, decided.asked.name))
            self._pools.hold(uid, results_of(found or {}))

    def allocated(self) -> Iterator[Mapping[str, Any]]:
        """Claims that hold devices of ours, as they were seen."""
        for found in self.claims.values():
            if is_ours(results_of(found)):
                yield found


def is_ours(results: Iterable[Result]) -> bool:
    """Whether an allocation is one that we made."""
    drivers = {one.driver for one in results}
    return drivers == {DRIVER}


def _is_newer(found: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    new, was = found["metadata"]["resourceVersion"], known["metadata"]["resourceVersion"]
    return int(new) > int(was) if new.isdigit() and was.isdigit() else bool(new != was)
