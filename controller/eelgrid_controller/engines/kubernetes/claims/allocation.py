"""Allocates devices to ResourceClaims: bundles to nodes, groups whole or not at all, bounded search.

A bundle (claims that end on one node) goes to the first node, by name, with the devices and the capacity, so that
nodes fill one after another. `firstAvailable` alternatives are tried in order. A node's capacity is its allocatable
amounts less bound, pinned and promised pods.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.claims.cel import CelSelector
from eelgrid_controller.engines.kubernetes.claims.device_pools import (
    DRIVER_NAME,
    AllocationResult,
    DevicePool,
    DevicePools,
    PooledDevice,
)
from eelgrid_controller.engines.kubernetes.model.node_affinity import satisfies_constraint
from eelgrid_controller.engines.kubernetes.model.node_inventory import closed_reason
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, ResourceAmounts, pod_requests

MAX_DEVICES = 32  # of one claim, by the API
MAX_VARIANTS = 64
_VALUES_MOST = 64
_STEPS_MOST = 200


class DeviceRequest(NamedTuple):
    """Devices for one request: so many that all expressions take, or just these by name."""

    request: str
    driver: str = DRIVER_NAME
    choices: tuple[CelSelector, ...] = ()
    many: int = 1
    devices: tuple[str, ...] = ()

    @property
    def device_count(self) -> int:
        """How many devices."""
        return len(self.devices) or self.many


class MatchAttribute(NamedTuple):
    """Devices of these requests, or of all where none are named, have one value of an attribute."""

    requests: frozenset[str]
    attribute: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """One claim. `variants` are what it may have, the first rather than the next.

    `config` is the claim's own, `classes` the name and the config of each request's class: both go into the allocation.
    """

    namespace: str
    name: str
    uid: str
    variants: tuple[tuple[DeviceRequest, ...], ...]
    same: tuple[MatchAttribute, ...] = ()
    config: tuple[Mapping[str, Any], ...] = ()
    classes: Mapping[str, tuple[str, tuple[Mapping[str, Any], ...]]] = field(default_factory=dict)
    tolerations: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)  # by request


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBundle:
    """Claims that end on one node, on this one where it is named; `group` binds bundles together.

    Bundles of one `kind` are equal for whoever looks for a node; the default is by what they ask for. `token` is for
    whoever made the bundle.
    """

    token: str = ""
    claims: tuple[ClaimRequest, ...]
    node_name: str = ""
    group: str = ""
    kind: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleAllocation:
    """Devices of one node, for each claim of a bundle in its order."""

    bundle: ClaimBundle
    node_name: str
    results: tuple[tuple[AllocationResult, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnallocatedBundle:
    """A bundle that waits, and why."""

    bundle: ClaimBundle
    reason: str


def allocate_claims(
    pools: DevicePools, bundles: Sequence[ClaimBundle], room: "ClusterCapacity"
) -> list[BundleAllocation | UnallocatedBundle]:
    """An answer for each bundle, in their order; `pools` and `room` are less what was given afterwards."""
    search = _Search(pools, room)
    groups: dict[str, list[int]] = {}
    for number, bundle in enumerate(bundles):
        groups.setdefault(bundle.group or f"\0{number}", []).append(number)
    answers: dict[int, BundleAllocation | UnallocatedBundle] = {}
    for members in groups.values():
        made: list[BundleAllocation] = []
        for number in members:
            answer = search.find_devices(bundles[number])
            answers[number] = answer
            if isinstance(answer, BundleAllocation):
                made.append(answer)
                continue
            search.give_back(made)
            waits = f"{_claim_names(answer.bundle)} of its group has no devices: {answer.reason}"
            answers |= {
                other: UnallocatedBundle(bundle=bundles[other], reason=waits) for other in members if other != number
            }
            break
    return [answers[number] for number in range(len(bundles))]


class _Search:
    def __init__(self, pools: DevicePools, room: "ClusterCapacity") -> None:
        self._pools = pools
        self._room = room
        self._begin: dict[tuple[Hashable, int], int] = {}

    def find_devices(self, bundle: ClaimBundle) -> BundleAllocation | UnallocatedBundle:
        """Devices for a bundle, taken; or why there are none."""
        kind = bundle.kind if bundle.kind is not None else tuple((one.variants, one.same) for one in bundle.claims)
        variants = list(islice(product(*(one.variants for one in bundle.claims)), MAX_VARIANTS))
        for wants in variants[0]:
            if (
                not all(want.device_count >= 1 for want in wants)
                or sum(want.device_count for want in wants) > MAX_DEVICES
            ):
                return UnallocatedBundle(
                    bundle=bundle, reason=f"a claim has 1 to {MAX_DEVICES} devices; ask for so many"
                )
        for number, variant in enumerate(variants):
            found = self._over_nodes(bundle, (kind, number), variant)
            if found is not None:
                return found
        where = bundle.node_name or f"any of {len(self._nodes(variants[0]))} nodes"
        return UnallocatedBundle(bundle=bundle, reason=f"{_words(variants[0])} not free on {where}")

    def give_back(self, made: Iterable[BundleAllocation]) -> None:
        """What a group gave up is free again, also for those whose search went past it."""
        for one in made:
            for claim in one.bundle.claims:
                self._pools.set_allocation(claim.uid, ())
            self._room.reserve(one.bundle, one.node_name, -1)
            self._begin.clear()

    def _nodes(self, variant: Sequence[Sequence[DeviceRequest]]) -> Sequence[str]:
        drivers = [want.driver for wants in variant for want in wants]
        return self._pools.node_names(DRIVER_NAME if DRIVER_NAME in drivers else drivers[0])

    def _over_nodes(
        self, bundle: ClaimBundle, kind: tuple[Hashable, int], variant: Sequence[Sequence[DeviceRequest]]
    ) -> BundleAllocation | None:
        if bundle.node_name:
            return self._at(bundle, kind, variant, bundle.node_name)
        nodes = self._nodes(variant)
        for number in range(self._begin.get(kind, 0), len(nodes)):
            self._begin[kind] = number
            found = self._at(bundle, kind, variant, nodes[number])
            if found is not None:
                return found
        self._begin[kind] = len(nodes)
        return None

    def _at(
        self, bundle: ClaimBundle, kind: Hashable, variant: Sequence[Sequence[DeviceRequest]], node_name: str
    ) -> BundleAllocation | None:
        pools: dict[str, DevicePool] = {}
        for wants in variant:
            for want in wants:
                pool = self._pools.get_pool(want.driver, node_name)
                if pool is None or kind in pool.full:
                    return None
                pools[want.driver] = pool
        if not self._room.can_host(bundle, node_name):
            return None
        chosen = _choose(pools, bundle.claims, variant)
        if chosen is None:
            # Several drivers may each have room again without the other.
            if len(pools) == 1:
                next(iter(pools.values())).full.add(kind)
            return None
        for claim, results in zip(bundle.claims, chosen, strict=True):
            self._pools.set_allocation(claim.uid, results)
        self._room.reserve(bundle, node_name, 1)
        return BundleAllocation(bundle=bundle, node_name=node_name, results=chosen)


# One node


class _Need(NamedTuple):
    claim: int
    order: int  # in the claim
    want: DeviceRequest
    name: str  # one exact device


def _choose(
    pools: Mapping[str, DevicePool], claims: Sequence[ClaimRequest], variant: Sequence[Sequence[DeviceRequest]]
) -> tuple[tuple[AllocationResult, ...], ...] | None:
    """Devices for each claim; the pools are left as they were."""
    needs = [
        _Need(number, order, want, want.devices[step] if want.devices else "")
        for number, wants in enumerate(variant)
        for order, want in enumerate(wants)
        for step in range(want.device_count)
    ]
    needs.sort(key=lambda one: -_size(pools[one.want.driver], one.want))
    for allowed in islice(_agreements(pools, claims, variant), _VALUES_MOST):
        found: list[tuple[_Need, PooledDevice]] = []
        steps = [_STEPS_MOST]
        is_found = _descend(pools, needs, allowed, found, steps)
        for need, offer in found:
            pools[need.want.driver].reserve(offer.name, -1)
        if is_found:
            found.sort(key=lambda pair: (pair[0].claim, pair[0].order))
            return tuple(
                tuple(
                    AllocationResult(need.want.request, need.want.driver, offer.pool, offer.name)
                    for need, offer in found
                    if need.claim == number
                )
                for number in range(len(claims))
            )
    return None


_Allowed = Callable[[_Need, PooledDevice], bool]


def _descend(
    pools: Mapping[str, DevicePool],
    needs: Sequence[_Need],
    allowed: _Allowed,
    found: list[tuple[_Need, PooledDevice]],
    steps: list[int],
) -> bool:
    """Whether all needs are met; what was taken for them stands in `found` and in the pools."""
    if len(found) == len(needs):
        return True
    need = needs[len(found)]
    pool = pools[need.want.driver]
    every = pool.matching_devices(need.want.choices)
    fitting = [
        one
        for one in every
        if (not need.name or one.name == need.name) and pool.has_capacity(one) and allowed(need, one)
    ]
    is_last = len(found) + 1 == len(needs)
    for offer in [min(fitting, key=pool.sort_key)] if is_last and fitting else sorted(fitting, key=pool.sort_key):
        if steps[0] <= 0:
            return False
        steps[0] -= 1
        pool.reserve(offer.name)
        found.append((need, offer))
        if _descend(pools, needs, allowed, found, steps):
            return True
        found.pop()
        pool.reserve(offer.name, -1)
    return False


def _agreements(
    pools: Mapping[str, DevicePool], claims: Sequence[ClaimRequest], variant: Sequence[Sequence[DeviceRequest]]
) -> Iterator[_Allowed]:
    """Every way in which the devices of claims may agree about attributes; the one of the fullest GPUs first."""
    agreed = [(number, same) for number, claim in enumerate(claims) for same in claim.same]
    if not agreed:
        yield lambda _need, _offer: True
        return
    values: list[list[Any]] = []
    for number, same in agreed:
        offers = [
            (pools[want.driver].sort_key(one), one.seen.attributes[same.attribute])
            for want in variant[number]
            if _covers(same, want)
            for one in pools[want.driver].matching_devices(want.choices)
            if same.attribute in one.seen.attributes and pools[want.driver].has_capacity(one)
        ]
        values.append(list(dict.fromkeys(value for _, value in sorted(offers, key=lambda pair: pair[0]))))
    for chosen in product(*values):
        rules = list(zip(agreed, chosen, strict=True))
        yield lambda need, offer, rules=rules: all(  # type: ignore[misc]
            number != need.claim or not _covers(same, need.want) or offer.seen.attributes.get(same.attribute) == value
            for (number, same), value in rules
        )


def _covers(same: MatchAttribute, want: DeviceRequest) -> bool:
    return not same.requests or want.request in same.requests or want.request.partition("/")[0] in same.requests


def _size(pool: DevicePool, want: DeviceRequest) -> int:
    return min((sum(count for _, count in one.takes) for one in pool.matching_devices(want.choices)), default=0)


def _claim_names(bundle: ClaimBundle) -> str:
    return ", ".join(one.name for one in bundle.claims)


def _words(variant: Sequence[Sequence[DeviceRequest]]) -> str:
    """The devices that were searched for, in words."""
    parts = []
    for wants in variant:
        for want in wants:
            what = ", ".join(want.devices) or " && ".join(one.text for one in want.choices) or want.driver
            parts.append(what if want.devices else f"{want.many} of [{what}]")
    return " and ".join(parts)[:400]


def allocation_body(
    asked: ClaimRequest, results: Sequence[AllocationResult], node_name: str, timestamp: str
) -> dict[str, Any]:
    """`status.allocation` of the claim; without the timestamp (RFC 3339) kube-scheduler never binds its pod."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node_name]}]}
    devices: dict[str, Any] = {"results": []}
    for one in results:
        tolerations = asked.tolerations.get(one.request)
        devices["results"].append(one._asdict() | ({"tolerations": list(tolerations)} if tolerations else {}))
    config = list(_config(asked, [one.request for one in results]))
    if config:
        devices["config"] = config
    return {"allocationTimestamp": timestamp, "devices": devices, "nodeSelector": {"nodeSelectorTerms": [term]}}


def _config(asked: ClaimRequest, requests: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What drivers are told with the devices, in the order in which kube-scheduler writes it: classes first, each once."""
    by_class: dict[str, list[str]] = {}
    for request in dict.fromkeys(requests):
        if request in asked.classes:
            by_class.setdefault(asked.classes[request][0], []).append(request)
    for some in by_class.values():
        for one in asked.classes[some[0]][1]:
            yield {"source": "FromClass", "requests": some, **one}
    given = {*requests, *(request.partition("/")[0] for request in requests)}
    for one in asked.config:
        if not one.get("requests") or given & set(one["requests"]):
            yield {"source": "FromClaim", **one}


class BundleLoad(NamedTuple):
    """Pods that go to one node, and the nodes that are not to be tried."""

    pods: tuple[Pod, ...]
    avoid: frozenset[str] = frozenset()


class _Sum(NamedTuple):
    cpu_milli: int = 0
    memory_bytes: int = 0
    pods: int = 0

    def plus(self, amounts: ResourceAmounts) -> "_Sum":
        return _Sum(self.cpu_milli + amounts.cpu_milli, self.memory_bytes + amounts.memory_bytes, self.pods + 1)


@dataclass(slots=True)
class _On:
    pods: dict[str, Mapping[str, Any] | ResourceAmounts] = field(default_factory=dict)
    total: _Sum | None = None


class ClusterCapacity:
    """All nodes; as `Room` it judges bundles whose burden was told."""

    def __init__(self) -> None:
        self.nodes: dict[str, KubeNode] = {}
        self.burdens: dict[str, BundleLoad] = {}  # by the bundle's token
        self._on: dict[str, _On] = {}
        self._where: dict[str, str] = {}  # uid -> node
        self._promised: dict[str, str] = {}  # uid -> node

    def put_pod(self, uid: str, found: Mapping[str, Any], node_name: str) -> None:
        """A pod is on a node, or can only go there; nowhere where that is empty."""
        if node_name:
            self._promised.pop(uid, None)
        elif uid in self._promised:
            return
        self._put(uid, found, node_name)

    def reserve_pod(self, pod: Pod, node_name: str) -> None:
        """A pod is sent to a node; with an empty name, to none any longer."""
        if node_name:
            self._promised[pod.uid] = node_name
        elif self._promised.pop(pod.uid, None) is None:
            return
        self._put(pod.uid, pod.requested, node_name)

    def remove_pod(self, uid: str) -> None:
        """A pod was deleted."""
        self._promised.pop(uid, None)
        self._put(uid, {}, "")

    def _put(self, uid: str, found: Mapping[str, Any] | ResourceAmounts, node_name: str) -> None:
        before = self._where.pop(uid, "")
        if before:
            on = self._on[before]
            if before == node_name and on.pods[uid] is found:
                self._where[uid] = before
                return
            del on.pods[uid]
            on.total = None
        if node_name:
            self._where[uid] = node_name
            on = self._on.setdefault(node_name, _On())
            on.pods[uid] = found
            on.total = None

    def closed_reason(self, node_name: str) -> str:
        """Why nothing may go to a node; empty where it may."""
        node = self.nodes.get(node_name)
        return f"there is no node {node_name}" if node is None else closed_reason(node)

    def can_host(self, bundle: ClaimBundle, node_name: str) -> bool:
        """Whether all pods of a bundle may go to a node and have room there."""
        node = self.nodes.get(node_name)
        burden = self.burdens[bundle.token]
        if node is None or node_name in burden.avoid or closed_reason(node):
            return False
        held = self._total(node_name)
        for pod in burden.pods:
            if not satisfies_constraint(pod.constraint, node):
                return False
            if self._where.get(pod.uid) != node_name:
                held = held.plus(pod.requested)
        return (
            held.cpu_milli <= node.allocatable.cpu_milli
            and held.memory_bytes <= node.allocatable.memory_bytes
            and (node.pods_most is None or held.pods <= node.pods_most)
        )

    def reserve(self, bundle: ClaimBundle, node_name: str, sign: int) -> None:
        """A bundle's pods go to a node, or do not."""
        for pod in self.burdens[bundle.token].pods:
            if not pod.node_name:
                self.reserve_pod(pod, node_name if sign > 0 else "")

    def _total(self, node_name: str) -> _Sum:
        on = self._on.get(node_name)
        if on is None:
            return _Sum()
        if on.total is None:
            total = _Sum()
            for uid, found in on.pods.items():
                amounts = found if isinstance(found, ResourceAmounts) else _amounts(found)
                on.pods[uid] = amounts
                total = total.plus(amounts)
            on.total = total
        return on.total


def _amounts(found: Mapping[str, Any]) -> ResourceAmounts:
    try:
        return pod_requests(found.get("spec") or {}, found.get("status") or {})
    except KubernetesUnreadable:
        # The API server would not have taken it.
        return ResourceAmounts()
