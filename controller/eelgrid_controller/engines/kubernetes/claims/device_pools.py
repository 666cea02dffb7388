"""Devices that ResourceSlices publish, node by node, their counters, and the claims that hold them.

A device is free while nobody holds it and no counter would fall below zero. The best is on the fullest counter set,
and there the one that shuts out the least. A pool counts only when all slices of its newest generation are present.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.claims.cel import CelDevice, CelSelector
from eelgrid_controller.engines.kubernetes.model.quantities import QuantityUnreadable, parse_nanos

DRIVER_NAME = "gpu.eelgrid.io"
_MANAGED_TAINT = "eelgrid.io/managed"
_REPELLING = ("NoSchedule", "NoExecute")
_NANOS = 10**9


class AllocationResult(NamedTuple):
    """One device of an allocation."""

    request: str
    driver: str
    pool: str
    device: str


def allocation_results(claim: Mapping[str, Any]) -> tuple[AllocationResult, ...]:
    """What a claim holds; access for monitors holds nothing."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return tuple(
        AllocationResult(one.get("request", ""), one["driver"], one["pool"], one["device"])
        for one in (allocation.get("devices") or {}).get("results") or ()
        if not one.get("adminAccess")
    )


class PooledDevice(NamedTuple):
    """One device: what an expression sees of it, and what it takes."""

    name: str
    pool: str
    counter_set: str
    takes: tuple[tuple[tuple[str, str], int], ...]  # by set and counter
    cost: int
    seen: CelDevice
    is_closed: bool


@dataclass(slots=True)
class DevicePool:
    """One driver's devices on one node."""

    offers: dict[str, PooledDevice] = field(default_factory=dict)
    free: dict[tuple[str, str], int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    taken: dict[str, int] = field(default_factory=dict)
    # What was found to have no room since something came free last.
    full: set[Hashable] = field(default_factory=set)
    _chosen: dict[tuple[CelSelector, ...], list[PooledDevice]] = field(default_factory=dict)

    def has_capacity(self, offer: PooledDevice) -> bool:
        """Whether nobody has it and its counters have room."""
        if offer.is_closed or self.taken.get(offer.name):
            return False
        return all(self.free.get(name, 0) >= count for name, count in offer.takes)

    def reserve(self, name: str, sign: int = 1) -> None:
        """A device is somebody's from now on; with -1 no more."""
        self.taken[name] = self.taken.get(name, 0) + sign
        offer = self.offers.get(name)
        if offer is not None:
            for key, count in offer.takes:
                self.free[key] = self.free.get(key, 0) - sign * count
            self.used[offer.counter_set] += sign * sum(count for _, count in offer.takes)
        if sign < 0:
            self.full.clear()

    def matching_devices(self, choices: tuple[CelSelector, ...]) -> list[PooledDevice]:
        """The devices that all these expressions take, free or not."""
        found = self._chosen.get(choices)
        if found is None:
            found = [one for one in self.offers.values() if all(choice.matches(one.seen) for choice in choices)]
            self._chosen[choices] = found
        return found

    def sort_key(self, offer: PooledDevice) -> tuple[int, int, str]:
        """What is best comes first."""
        return (-self.used[offer.counter_set], offer.cost, offer.name)

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is held than there is."""
        return any(count > 1 for count in self.taken.values()) or any(count < 0 for count in self.free.values())


class DevicePools:
    """All of them, by driver and node."""

    def __init__(self) -> None:
        self._slices: dict[str, Mapping[str, Any]] = {}  # specs by the name of the slice
        self._of: dict[tuple[str, str], dict[str, None]] = {}  # slices by driver and node
        self._made: dict[tuple[str, str], DevicePool | None] = {}
        self._nodes: dict[str, list[str]] = {}  # by driver, in order
        self._where: dict[tuple[str, str], str] = {}  # node by driver and pool
        self._holds: dict[str, tuple[AllocationResult, ...]] = {}  # by claim's uid
        self._holders: dict[tuple[str, str], dict[str, None]] = {}  # claims by driver and pool
        self._abroad: dict[str, set[str]] = {}  # slices that lie on no single node, by driver

    def put_slice(self, name: str, spec: Mapping[str, Any]) -> None:
        """A slice as it is now."""
        self.remove_slice(name)
        driver, node_name = spec["driver"], spec.get("nodeName")
        if not node_name:
            self._abroad.setdefault(driver, set()).add(name)
            self._slices[name] = spec
            return
        key = (intern(driver), intern(node_name))
        self._slices[name] = spec
        if not self._of.get(key):
            self._nodes.pop(driver, None)
        self._of.setdefault(key, {})[name] = None
        self._where[driver, spec["pool"]["name"]] = node_name
        self._made.pop(key, None)

    def remove_slice(self, name: str) -> Mapping[str, Any] | None:
        """A slice that is no more; what it was."""
        spec = self._slices.pop(name, None)
        if spec is None:
            return None
        driver, node_name = spec["driver"], spec.get("nodeName")
        if not node_name:
            self._abroad[driver].discard(name)
            return spec
        key = (driver, node_name)
        self._of[key].pop(name, None)
        self._made.pop(key, None)
        if not self._of[key]:
            del self._of[key]
            self._nodes.pop(driver, None)
        return spec

    def set_allocation(self, uid: str, results: tuple[AllocationResult, ...]) -> None:
        """What a claim holds from now on, instead of what it held."""
        before = self._holds.get(uid, ())
        if before == results:
            return
        for sign, found in ((-1, before), (1, results)):
            for one in found:
                holders = self._holders.setdefault((one.driver, one.pool), {})
                if sign > 0:
                    holders[uid] = None
                else:
                    holders.pop(uid, None)
                pool = self._made.get((one.driver, self.node_of(one.driver, one.pool)))
                if pool is not None:
                    pool.reserve(one.device, sign)
        if results:
            self._holds[uid] = results
        else:
            self._holds.pop(uid, None)

    def allocation_of(self, uid: str) -> tuple[AllocationResult, ...]:
        """What a claim holds."""
        return self._holds.get(uid, ())

    def claims_holding(self, driver: str, node_name: str) -> set[str]:
        """The claims that hold something there."""
        pools = {self._slices[name]["pool"]["name"] for name in self._of.get((driver, node_name), ())}
        return {uid for pool in pools for uid in self._holders.get((driver, pool), ())}

    def node_of(self, driver: str, pool: str) -> str:
        """The node that a pool is of; ours bear the node's name."""
        return self._where.get((driver, pool), pool if driver == DRIVER_NAME else "")

    def node_names(self, driver: str) -> list[str]:
        """The nodes on which a driver has slices, by name."""
        found = self._nodes.get(driver)
        if found is None:
            found = self._nodes[driver] = sorted(node for one, node in self._of if one == driver)
        return found

    def is_network_attached(self, driver: str) -> bool:
        """Whether devices of a driver lie on no single node: which nodes reach them only kube-scheduler knows."""
        return bool(self._abroad.get(driver))

    def get_pool(self, driver: str, node_name: str) -> DevicePool | None:
        """A node's devices; None while its slices are not all there."""
        key = (driver, node_name)
        if key in self._made:
            return self._made[key]
        specs = [self._slices[name] for name in sorted(self._of.get(key, ()))]
        pool = _pool(specs)
        if pool is not None:
            for uid in self.claims_holding(driver, node_name):
                for one in self._holds[uid]:
                    if one.driver == driver and self.node_of(driver, one.pool) == node_name:
                        pool.reserve(one.device)
        if specs:
            self._made[key] = pool
        return pool


def _pool(specs: Iterable[Mapping[str, Any]]) -> DevicePool | None:
    """Of one driver on one node: every pool that is there whole, at its newest generation."""
    newest: dict[str, list[Mapping[str, Any]]] = {}
    for spec in specs:
        about = spec["pool"]
        known = newest.get(about["name"])
        if known is None or about["generation"] > known[0]["pool"]["generation"]:
            newest[about["name"]] = [spec]
        elif about["generation"] == known[0]["pool"]["generation"]:
            known.append(spec)
    whole = [found for found in newest.values() if len(found) == found[0]["pool"]["resourceSliceCount"]]
    if not whole or len(whole) < len(newest):
        return None
    made = DevicePool()
    for found in whole:
        _fill(made, found)
    return made


def _fill(pool: DevicePool, specs: Iterable[Mapping[str, Any]]) -> None:
    offers: list[PooledDevice] = []
    for spec in specs:
        for one in spec.get("sharedCounters") or ():
            for name, counter in one["counters"].items():
                pool.free[one["name"], name] = _whole(counter["value"])
        offers += [_parse_device(spec, one) for one in spec.get("devices") or ()]
    by_set: dict[str, list[PooledDevice]] = defaultdict(list)
    for one in offers:
        by_set[one.counter_set].append(one)
    for some in by_set.values():
        costs = _costs(tuple(tuple((key[1], count) for key, count in one.takes) for one in some))
        for one, cost in zip(some, costs, strict=True):
            pool.offers[one.name] = one._replace(cost=cost)


def _parse_device(spec: Mapping[str, Any], one: Mapping[str, Any]) -> PooledDevice:
    driver = spec["driver"]
    uses = one.get("consumesCounters") or ()
    takes = tuple(
        ((use["counterSet"], name), _whole(value["value"])) for use in uses for name, value in use["counters"].items()
    )
    seen = CelDevice(driver, dict(_attributes(driver, one)), dict(_capacity(driver, one)))
    closed = any(
        taint["effect"] in _REPELLING and not (driver == DRIVER_NAME and taint["key"] == _MANAGED_TAINT)
        for taint in one.get("taints") or ()
    )
    set_name = uses[0]["counterSet"] if uses else one["name"]
    return PooledDevice(one["name"], spec["pool"]["name"], set_name, takes, 0, seen, closed)


@lru_cache(maxsize=256)
def _costs(takes: tuple[tuple[tuple[str, int], ...], ...]) -> tuple[int, ...]:
    """What each device of a set shuts out; GPUs of one product have the same."""
    wants = [{name for name, _ in one if name.startswith("memory-slice-")} for one in takes]
    return tuple(
        sum(len(takes[other]) for other in range(len(takes)) if other != one and wants[one] & wants[other])
        for one in range(len(takes))
    )


def _attributes(driver: str, one: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str | int | bool]]:
    for name, value in (one.get("attributes") or {}).items():
        for kind in ("string", "int", "bool"):
            if kind in value:
                yield _key(driver, name), value[kind]


def _capacity(driver: str, one: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Fraction]]:
    for name, value in (one.get("capacity") or {}).items():
        try:
            yield _key(driver, name), Fraction(parse_nanos(value["value"]), _NANOS)
        except QuantityUnreadable:
            continue


def _key(driver: str, name: str) -> tuple[str, str]:
    domain, slash, rest = name.partition("/")
    return (domain, rest) if slash else (driver, name)


def _whole(text: Any) -> int:
    return parse_nanos(text) // _NANOS
