"""What the kubelet gave to pods, told to the controller.

Owns what is told and when it is told anew. Must not know how it gets there, nor what the
controller makes of it.

Theory. Allocate carries no word of whose pod it is, so nobody knows which pod has which
device until PodResources says so; the controller lets the next pod go when it has heard. So
after each Allocate the kubelet is asked within a second, and what it says is told even if it
reads as before: a pod of the same name may have the same device again. Otherwise only a
change is told. Ids are the driver's UUIDs; a replica of a shared device is told as the
device. While the kubelet does not answer nothing is told, which is not the same as nothing
being held.
"""

from collections.abc import Callable, Iterable

from eelgrid_agent.attribution.device_ids import Place, find_device
from eelgrid_protos.kubelet import ContainerDevices
from eelgrid_protos.messages import PODS_WITH_DEVICES_MOST, Gpu, HeldDevices, PodDevices

__all__ = ["Telling", "held_devices"]

_NAME_MOST = 253


def held_devices(containers: Iterable[ContainerDevices], gpus: Iterable[Gpu], *, steers: bool) -> HeldDevices:
    """What each pod holds of these GPUs, in order of names; ids of other devices are passed over."""
    devices = tuple(gpus)
    by_place = {Place(gpu.uuid): gpu.uuid for gpu in devices}
    for gpu in devices:
        for instance in gpu.gpu_instances:
            parts = instance.compute_instances
            if parts and parts[0].uuid:
                by_place[Place(gpu.uuid, instance.id)] = parts[0].uuid
    found: dict[tuple[str, str], set[str]] = {}
    for one in containers:
        places = (find_device(device_id, devices) for _, device_id in one.devices)
        uuids = {by_place[place] for place in places if place in by_place}
        if uuids and len(one.namespace) <= _NAME_MOST and len(one.pod) <= _NAME_MOST:
            found.setdefault((one.namespace, one.pod), set()).update(uuids)
    pods = tuple(
        PodDevices(namespace=namespace, pod=pod, device_uuids=tuple(sorted(uuids)))
        for (namespace, pod), uuids in sorted(found.items())[:PODS_WITH_DEVICES_MOST]
    )
    return HeldDevices(steers=steers, pods=pods)


class Telling:
    """Tells each answer of the kubelet that says something new, or that follows an allocation."""

    def __init__(
        self, *, gpus: Callable[[], tuple[Gpu, ...]], tell: Callable[[HeldDevices], None], steers: bool
    ) -> None:
        self._gpus = gpus
        self._tell = tell
        self._steers = steers
        self._told: HeldDevices | None = None
        self._is_due = False

    def given(self) -> None:
        """A container was given devices: what the kubelet says next is told whatever it is."""
        self._is_due = True

    def heard(self, containers: Iterable[ContainerDevices]) -> None:
        """The kubelet has answered."""
        found = held_devices(containers, self._gpus(), steers=self._steers)
        if found != self._told or self._is_due:
            self._told, self._is_due = found, False
            self._tell(found)
