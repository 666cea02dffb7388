"""Devices of the device plugins: those offered for each resource, and the preferred allocation. Pure.

Theory (preferred allocation). The kubelet names what is free and how many are wanted, and does not say for which
pod. The plan says which replica was placed on which devices, so a set of just that size
whose devices are all free and held by nobody yet is what the next pod was placed on; the
controller lets one pod at a time go to a node and a resource, and where two are under way
their sets are of one size, so that either may have either. Without a plan's word whole
GPUs lie as near to each other as can be: nearness is the number of active NVLinks of each
pair, then a nearer common ancestor. Slices are chosen one by one as the controller chooses
them (`mig_slices.py` there): on the fullest GPU in use; where none is, on one that has
room for most of what is asked for. What is free now is held by nobody, whatever was said of
it before: the kubelet names it.

Theory (offered devices). A GPU without MIG is one device of `nvidia.com/gpu`. One that is cut offers each GPU
instance whose one compute instance takes all of it, under the name of its profile, as
NVIDIA's plugin does with the strategy `mixed`: `nvidia.com/mig-1g.10gb`, `+` spelled as `.`.
An instance that is cut further holds several compute instances and is no device here. A GPU
between two modes offers nothing: what the kubelet would give away may be gone a second later.
A device that is lost or cordoned is offered as unhealthy: pods that hold it run on, no other
gets it. Ids are the driver's UUIDs, so they mean the same to PodResources and to NVML.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_protos.kubelet_api import OfferedDevice, PreferredAllocationRequest
from eelgrid_protos.messages import Assignment, Gpu, GpuInstance, GpuLink

# Beyond so many sets of devices they are taken one by one, each the nearest to those before.
_SETS_MOST = 20_000
# Farther than any ancestor that NVML names.
_FAR = 60


class NodeDevices(NamedTuple):
    """What the choice looks at."""

    index_of: Mapping[str, int]  # GPU of each device
    links: Sequence[GpuLink] = ()
    wanted: Sequence[frozenset[str]] = ()  # by the plan, the oldest first
    held: frozenset[str] = frozenset()  # by pods, as the kubelet says
    slices: Mapping[str, int] = MappingProxyType({})  # memory slices of each device that is one


def planned_device_sets(assignments: Iterable[Assignment]) -> tuple[frozenset[str], ...]:
    """The devices of each replica that the plan holds here."""
    return tuple(frozenset(item.gpu_uuids) for item in assignments if item.gpu_uuids)


def choose_devices(asked: PreferredAllocationRequest, node: NodeDevices) -> tuple[str, ...]:
    """So many devices as were asked for, those that must be among them first; fewer where so many are not free."""
    must = tuple(dict.fromkeys(asked.must))
    free = [one for one in dict.fromkeys(asked.available) if one not in must]
    count = asked.size - len(must)
    if count <= 0 or len(free) <= count:
        return (*must, *free[: max(0, count)])
    open_ = frozenset((*must, *free))
    node = node._replace(held=node.held - open_)
    for wanted in node.wanted:
        if len(wanted) == asked.size and wanted <= open_ and wanted.issuperset(must):
            return (*must, *sorted(wanted.difference(must)))
    spoken_for = frozenset[str]().union(*(wanted for wanted in node.wanted if not wanted & node.held))
    rest = [one for one in free if one not in spoken_for]
    rest = rest if len(rest) >= count else free
    if all(one in node.slices for one in rest):
        return (*must, *_fullest(must, rest, count, node))
    return (*must, *_near(must, rest, count, node))


def _fullest(must: Sequence[str], free: Sequence[str], count: int, node: NodeDevices) -> tuple[str, ...]:
    """Slices on GPUs in use first, the fullest of them; of equals the first by GPU and start."""
    among = frozenset(free)
    left = [one for one in node.slices if one in among]
    used: dict[int, int] = {}
    for one in (*node.held, *must):
        if one in node.index_of:
            used[node.index_of[one]] = used.get(node.index_of[one], 0) + node.slices.get(one, 0)
    chosen: list[str] = []
    while len(chosen) < count:
        room = Counter(node.index_of[one] for one in left)
        wanted = count - len(chosen)

        def order(one: str, room: Counter[int] = room, wanted: int = wanted) -> tuple[bool, int, int, int]:
            index = node.index_of[one]
            is_asleep = index not in used
            return is_asleep, -min(room[index], wanted) if is_asleep else 0, -used.get(index, 0), index

        best = min(left, key=order)
        chosen.append(best)
        left.remove(best)
        index = node.index_of[best]
        used[index] = used.get(index, 0) + node.slices[best]
    return tuple(chosen)


def _near(must: Sequence[str], free: Sequence[str], count: int, node: NodeDevices) -> tuple[str, ...]:
    near = _nearness(node.links)
    used = {node.index_of.get(one) for one in node.held}

    def apart(devices: Sequence[str]) -> tuple[int, int, tuple[int, ...]]:
        indexes = [node.index_of.get(one, -1) for one in devices]
        distance = sum(
            near.get(frozenset(pair), 0 if pair[0] == pair[1] else _FAR) for pair in combinations(indexes, 2)
        )
        opened = sum(index not in used for index in set(indexes))
        return distance, opened, tuple(sorted(indexes))

    if _sets(len(free), count) <= _SETS_MOST:
        return min(combinations(free, count), key=lambda some: apart((*must, *some)))
    chosen: list[str] = []
    for _ in range(count):
        left = [one for one in free if one not in chosen]
        chosen.append(min(left, key=lambda one: apart((*must, *chosen, one))))
    return tuple(chosen)


def _nearness(links: Iterable[GpuLink]) -> dict[frozenset[int], int]:
    """Less is nearer: a pair with NVLinks is below zero, the more the lower."""
    return {frozenset((link.one, link.other)): -100 * link.nvlinks if link.nvlinks else link.ancestor for link in links}


def _sets(count: int, size: int) -> int:
    """How many sets there are, or the bound and one more."""
    total = 1
    for number in range(size):
        total = total * (count - number) // (number + 1)
        if total > _SETS_MOST:
            return _SETS_MOST + 1
    return total


def whole_gpu_resource(domain: str) -> str:
    """The name of whole GPUs."""
    return f"{domain}/gpu"


def mig_profile_resource(domain: str, profile: str) -> str:
    """The name of slices of one profile."""
    return f"{domain}/mig-{profile.replace('+', '.')}"


def build_offers(gpus: Iterable[Gpu], domain: str) -> dict[str, tuple[OfferedDevice, ...]]:
    """The devices by resource name, in order of GPU index and start."""
    found: dict[str, list[OfferedDevice]] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        is_healthy = not (gpu.lost or gpu.cordon)
        if gpu.mig_pending:
            continue
        if not gpu.mig_enabled:
            found.setdefault(whole_gpu_resource(domain), []).append(_device(gpu.uuid, gpu, is_healthy=is_healthy))
            continue
        for instance in sorted(gpu.gpu_instances, key=lambda one: one.start):
            uuid = _whole_instance(instance)
            if uuid:
                devices = found.setdefault(mig_profile_resource(domain, instance.profile), [])
                devices.append(_device(uuid, gpu, is_healthy=is_healthy))
    return {name: tuple(devices) for name, devices in found.items()}


def gpu_index_by_device(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """The index of the GPU that each device is on, by the device's id."""
    found: dict[str, int] = {}
    for gpu in gpus:
        found[gpu.uuid] = gpu.index
        found.update({uuid: gpu.index for one in gpu.gpu_instances if (uuid := _whole_instance(one))})
    return found


def memory_slices_by_device(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """How many memory slices each slice has, by the device's id; in order of GPU index and start."""
    return {
        uuid: one.size
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        for one in sorted(gpu.gpu_instances, key=lambda one: one.start)
        if (uuid := _whole_instance(one))
    }


def _whole_instance(instance: GpuInstance) -> str:
    """The UUID of the compute instance that is the whole of a GPU instance; empty where there is none."""
    parts = instance.compute_instances
    return parts[0].uuid if len(parts) == 1 else ""


def _device(uuid: str, gpu: Gpu, *, is_healthy: bool) -> OfferedDevice:
    return OfferedDevice(device_id=uuid, is_healthy=is_healthy, numa_node=gpu.numa_node)
