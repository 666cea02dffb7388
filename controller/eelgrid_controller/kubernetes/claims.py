"""Which devices resource claims get: allocations of gated pods' claims over the nodes' ResourceSlices, none in conflict.

Pure: owns the choice and the body that is written. Must not know how slices and claims are read or
written, nor why a pod goes to a node: that is the plan's. The API server compares no two claims,
so whoever allocates must be alone; the taint on our devices sees to that.

Theory. A device fits while no counter of its set would fall below zero and it is nobody's. On a
node the GPU that is fullest already is taken, so that whole ones stay whole, and of its devices
the one that shuts out the least: the sum of what the devices that overlap it take. That
puts a one-slice instance at the end and keeps halves free. Claims without a node go to the first
that has room, by name; within one call nodes only fill, so for each kind of claim the search goes
on where it ended. All claims of a group are allocated or none is.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Allocation", "AskedClaim", "Pools", "Unallocated", "allocate", "allocation_body", "pools_of"]

DRIVER = "gpu.eelgrid.io"
_MANAGED_TAINT = "eelgrid.io/managed"
_DEVICES_MOST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedClaim:
    """One claim: `count` devices of a profile, of whole GPUs without one, on one node; on this one where it is named.

    `devices` are exact names, which the plan chose already; `group` binds claims together.
    """

    namespace: str
    name: str
    uid: str
    request: str
    profile: str = ""
    count: int = 1
    node_name: str = ""
    devices: tuple[str, ...] = ()
    group: str = ""
    config: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Devices of one node for a claim."""

    asked: AskedClaim
    node_name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unallocated:
    """A claim that waits, and why."""

    asked: AskedClaim
    reason: str


class _Device(NamedTuple):
    name: str
    profile: str
    counter_set: str
    takes: tuple[tuple[str, int], ...]
    is_closed: bool


@dataclass(slots=True)
class _Pool:
    devices: dict[str, _Device] = field(default_factory=dict)
    free: dict[str, dict[str, int]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    # By profile, the devices and what each shuts out.
    ranked: dict[str, list[tuple[int, _Device]]] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def fits(self, device: _Device) -> bool:
        """Whether nobody has it and its counters have room."""
        if device.is_closed or device.name in self.taken:
            return False
        free = self.free.get(device.counter_set, {})
        return all(free.get(name, 0) >= count for name, count in device.takes)

    def take(self, device: _Device, sign: int = 1) -> None:
        """It is somebody's from now on; with -1 no more."""
        (self.taken.add if sign > 0 else self.taken.discard)(device.name)
        free = self.free.get(device.counter_set, {})
        for name, count in device.takes:
            free[name] = free.get(name, 0) - sign * count
        self.used[device.counter_set] += sign * sum(count for _, count in device.takes)

    def best(self, profile: str) -> _Device | None:
        """The device of a profile that shuts out the least, on the fullest GPU."""
        fitting = [(-self.used[one.counter_set], cost, one.name, one) for cost, one in self.ranked.get(profile, ())
                   if self.fits(one)]  # fmt: skip
        return min(fitting)[3] if fitting else None

    def rank(self) -> None:
        """Once all devices are known."""
        by_set: dict[str, list[_Device]] = defaultdict(list)
        for one in self.devices.values():
            by_set[one.counter_set].append(one)
        for one in self.devices.values():
            wants = {name for name, _ in one.takes if name.startswith("memory-slice-")}
            cost = sum(len(other.takes) for other in by_set[one.counter_set]
                       if other is not one and wants & {name for name, _ in other.takes})  # fmt: skip
            self.ranked.setdefault(one.profile, []).append((cost, one))


# The devices of all nodes and what is left of their counters, by node name.
Pools = dict[str, _Pool]


def pools_of(slices: Iterable[Mapping[str, Any]], allocated: Iterable[Mapping[str, Any]] = ()) -> Pools:
    """What is to be given, of pools that are there whole at their newest generation, less what claims have already."""
    newest: dict[str, list[Mapping[str, Any]]] = {}
    for one in slices:
        spec = one["spec"]
        if spec["driver"] != DRIVER or not spec.get("nodeName"):
            continue
        pool = spec["pool"]
        known = newest.get(spec["nodeName"])
        if known is None or pool["generation"] > known[0]["pool"]["generation"]:
            newest[spec["nodeName"]] = [spec]
        elif pool["generation"] == known[0]["pool"]["generation"]:
            known.append(spec)
    pools = {
        name: _pool(specs)
        for name, specs in sorted(newest.items())
        if len(specs) == specs[0]["pool"]["resourceSliceCount"]
    }
    for claim in allocated:
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
            found = pools.get(result["pool"]) if result["driver"] == DRIVER else None
            device = None if found is None else found.devices.get(result["device"])
            if found is not None and device is not None and device.name not in found.taken:
                found.take(device)
    return pools


def _pool(specs: Iterable[Mapping[str, Any]]) -> _Pool:
    pool = _Pool()
    for spec in specs:
        for one in spec.get("sharedCounters", ()):
            pool.free[one["name"]] = {name: int(counter["value"]) for name, counter in one["counters"].items()}
        for one in spec.get("devices", ()):
            uses = one.get("consumesCounters", ())
            takes = [(name, int(value["value"])) for use in uses for name, value in use["counters"].items()]
            profile = one.get("attributes", {}).get("profile", {}).get("string", "")
            closed = any(taint["key"] != _MANAGED_TAINT for taint in one.get("taints", ()))
            set_name = uses[0]["counterSet"] if uses else one["name"]
            pool.devices[one["name"]] = _Device(one["name"], profile, set_name, tuple(takes), closed)
    pool.rank()
    return pool


def allocate(pools: Pools, claims: Sequence[AskedClaim]) -> list[Allocation | Unallocated]:
    """An answer for each claim, in their order; `pools` are less what was given afterwards."""
    nodes = list(pools)
    begin: dict[tuple[str, int], int] = {}
    answers: dict[int, Allocation | Unallocated] = {}
    groups: dict[str, list[int]] = {}
    for number, asked in enumerate(claims):
        groups.setdefault(asked.group or f"\0{number}", []).append(number)
    for members in groups.values():
        made: list[Allocation] = []
        for number in members:
            answer = _allocated(pools, nodes, begin, claims[number])
            answers[number] = answer
            if isinstance(answer, Allocation):
                made.append(answer)
                continue
            # What a group gave up is free again, also for those whose search went past it.
            for one in made:
                _give_back(pools[one.node_name], one.devices)
            if made:
                begin.clear()
            waits = f"{answer.asked.name} of its group has no devices: {answer.reason}"
            answers |= {other: Unallocated(asked=claims[other], reason=waits) for other in members if other != number}
            break
    return [answers[number] for number in range(len(claims))]


def _allocated(
    pools: Pools, nodes: Sequence[str], begin: dict[tuple[str, int], int], asked: AskedClaim
) -> Allocation | Unallocated:
    if not 1 <= (len(asked.devices) or asked.count) <= _DEVICES_MOST:
        return Unallocated(asked=asked, reason=f"a claim has 1 to {_DEVICES_MOST} devices; ask for so many")
    kind = (asked.profile, asked.count)
    is_bound = bool(asked.node_name or asked.devices)
    first = 0 if is_bound else begin.get(kind, 0)
    for number, name in enumerate([asked.node_name] if is_bound else nodes[first:], first):
        pool = pools.get(name)
        chosen = None if pool is None else _chosen(pool, asked)
        if not is_bound:
            begin[kind] = number
        if chosen is not None:
            return Allocation(asked=asked, node_name=name, devices=chosen)
    if not is_bound:
        begin[kind] = len(nodes)
    what = ", ".join(asked.devices) or f"{asked.count} of {asked.profile or 'whole GPUs'}"
    where = f"node {asked.node_name or '(none named)'}" if is_bound else f"any of {len(nodes)} nodes"
    return Unallocated(asked=asked, reason=f"{what} not free on {where}; it waits, or the plan chooses others")


def _chosen(pool: _Pool, asked: AskedClaim) -> tuple[str, ...] | None:
    """Devices of one node, taken; None, and none taken, where they are not all to be had."""
    chosen: list[str] = []
    for step in range(len(asked.devices) or asked.count):
        device = pool.devices.get(asked.devices[step]) if asked.devices else pool.best(asked.profile)
        if device is None or not pool.fits(device):
            _give_back(pool, chosen)
            return None
        pool.take(device)
        chosen.append(device.name)
    return tuple(chosen)


def _give_back(pool: _Pool, devices: Iterable[str]) -> None:
    for name in devices:
        pool.take(pool.devices[name], -1)


def allocation_body(allocation: Allocation, timestamp: str) -> dict[str, Any]:
    """`status.allocation` of the claim; without the timestamp (RFC 3339) kube-scheduler never binds its pod."""
    asked = allocation.asked
    results = [
        {"request": asked.request, "driver": DRIVER, "pool": allocation.node_name, "device": device}
        for device in allocation.devices
    ]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [allocation.node_name]}]}
    devices: dict[str, Any] = {"results": results}
    if asked.config:
        devices["config"] = [{"source": "FromClaim", **one} for one in asked.config]
    return {"allocationTimestamp": timestamp, "devices": devices, "nodeSelector": {"nodeSelectorTerms": [term]}}
