"""Leases of a node's devices: which engine holds which GPU or MIG slice, since when, and who is refused.

Owns the table, its rule of overlap and how it is written down. Must not know a clock, a file, a driver or an engine.

Theory. Several engines may start work on one node (Kubernetes, Slurm, Ray, the local engine), and none of them knows what
the others do. Each asks here before it uses a device, so the second one is refused with the name of the first. A device is
a span of memory slices of one GPU, the whole of it or a GPU instance, so a slice that does not exist yet can be leased too:

    whole GPU   conflicts with every lease on that GPU
    slice       conflicts with the whole GPU, and with each slice whose span overlaps
    same span   two compute instances of one GPU instance have different UUIDs, and do not conflict

Leases of one owner never conflict with each other: whoever asks again, because an answer was lost, gets the same answer.
Shared leases of one engine do not conflict either, since that engine itself divides the device. Each lease has a serial
number, new whenever it is taken again, so that what was found out about an earlier holder does not end a later one.

Tables are values: a change returns another table, which is written down before anybody is told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from eelgrid_agent.state_files import StateFormat, require_text
from eelgrid_protos.messages import Gpu
from eelgrid_protos.values import dataclass

# Sixteen GPUs of seven slices with some owners of shares each.
LEASES_MOST = 1024
# Those of which the agent itself knows what runs.
LOCAL_ENGINE, KUBERNETES_ENGINE = "local", "kubernetes"
NAME_MOST = 253
_BYTES_MOST = 2 * 2**20


class LeaseHolder(NamedTuple):
    """Who holds a lease: the engine, and what of it, such as a job."""

    engine: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDevice:
    """A whole GPU (`size` 0), or the memory slices [start, start + size) of one.

    `uuid` is of the GPU or of the compute instance; empty for a device that is about to be created, whose place is kept
    and where nothing stands yet that must not be touched.
    """

    gpu_uuid: str
    uuid: str = ""
    start: int = 0
    size: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is a GPU and not a slice of one."""
        return self.size == 0

    def overlaps(self, other: "LeaseDevice") -> bool:
        """Whether both cannot be in two hands at once."""
        if self.gpu_uuid != other.gpu_uuid:
            return False
        if self.is_whole or other.is_whole:
            return True
        if (self.start, self.size) == (other.start, other.size):
            return not (self.uuid and other.uuid) or self.uuid == other.uuid
        return self.start < other.start + other.size and other.start < self.start + self.size

    def describe(self) -> str:
        """Names the device for a person."""
        if self.is_whole:
            return f"GPU {self.gpu_uuid}"
        return f"slice {self.uuid or 'to be made'} (memory slices {self.start} to {self.start + self.size - 1} of {self.gpu_uuid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEntry:
    """One device in one hand. `since_ns` is wall clock, of when its holder took it first.

    A holder that is a process has `pid` and `start_ticks` (field 22 of /proc/PID/stat, which tells it from a later one of
    the same number). `note` says more for a person, such as the name of a pod.
    """

    device: LeaseDevice
    holder: LeaseHolder
    serial: int
    since_ns: int
    boot_id: str = ""
    is_shared: bool = False
    pid: int = 0
    start_ticks: int = 0
    note: str = ""

    def describe_holder(self) -> str:
        """Names engine, owner and time for a person."""
        since = datetime.fromtimestamp(self.since_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        note = f" ({self.note})" if self.note else ""
        return f"{self.holder.engine} {self.holder.owner}{note} since {since}"


class LeaseRefused(Exception):
    """The device is not given; the message says who holds it and what to do."""

    # Whether the same request is granted later without a repair: when the holder has ended, or a change is over.
    passes = True


class DeviceLeased(LeaseRefused):
    """Another holder has the device, or a part of it."""

    def __init__(self, device: LeaseDevice, held: LeaseEntry) -> None:
        what = f"{device.describe()} is leased to {held.describe_holder()}"
        super().__init__(f"{what}; wait until that ends, or {_describe_remedy(held.holder)}")
        self.held = held


def _describe_remedy(holder: LeaseHolder) -> str:
    """How the holder is ended by hand: the agent's own engines know what runs, of others a lease may be left."""
    if holder.engine == LOCAL_ENGINE:
        return f"run `eelctl cancel {holder.owner.partition('/')[0]}`"
    if holder.engine == KUBERNETES_ENGINE:
        return "delete the pod or the claim"
    return f"if it has ended, run `eelgrid-agent lease release --engine {holder.engine} --owner '{holder.owner}'`"


class LeasesFull(LeaseRefused):
    """The table has no room."""

    passes = False


def find_lease_device(name: str, gpus: Iterable[Gpu]) -> LeaseDevice | None:
    """Returns the device of a UUID of a GPU or MIG slice, or of a GPU's index; None if the node has none such."""
    for gpu in gpus:
        if name in (gpu.uuid, str(gpu.index)):
            return LeaseDevice(gpu_uuid=gpu.uuid, uuid=gpu.uuid)
        for instance in gpu.gpu_instances:
            if any(name == child.uuid for child in instance.compute_instances):
                return LeaseDevice(gpu_uuid=gpu.uuid, uuid=name, start=instance.start, size=instance.size)
    return None


def find_place_device(gpu_uuid: str, instance_id: int | None, gpus: Iterable[Gpu]) -> LeaseDevice | None:
    """Returns a GPU, or one of its GPU instances by the driver's id; None if the node has none such."""
    gpu = next((gpu for gpu in gpus if gpu.uuid == gpu_uuid), None)
    if gpu is None or instance_id is None:
        return None if gpu is None else LeaseDevice(gpu_uuid=gpu.uuid, uuid=gpu.uuid)
    instance = next((one for one in gpu.gpu_instances if one.id == instance_id), None)
    if instance is None:
        return None
    uuid = instance.compute_instances[0].uuid if instance.compute_instances else ""
    return LeaseDevice(gpu_uuid=gpu.uuid, uuid=uuid, start=instance.start, size=instance.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTable:
    """All leases of a node, and the number of the last one.

    `adopted_boot` is the boot of the machine in which everything was put in that was in use already: in another one a device
    without a lease is not known to be free.
    """

    leases: tuple[LeaseEntry, ...] = ()
    serial: int = 0
    adopted_boot: str = ""

    def find_conflict(self, device: LeaseDevice, holder: LeaseHolder, *, is_shared: bool = False) -> LeaseEntry | None:
        """Returns the oldest lease that keeps this holder from the device; None if nothing does."""
        found = (
            lease
            for lease in self.leases
            if lease.holder != holder
            and lease.device.overlaps(device)
            and not (is_shared and lease.is_shared and lease.holder.engine == holder.engine)
        )
        return min(found, key=lambda lease: lease.serial, default=None)

    def take(
        self,
        holder: LeaseHolder,
        devices: Sequence[LeaseDevice],
        *,
        since_ns: int,
        boot_id: str = "",
        is_shared: bool = False,
        process: tuple[int, int] = (0, 0),
        note: str = "",
    ) -> "LeaseTable":
        """Leases all of these or none; `process` is id and start ticks. Raises DeviceLeased and LeasesFull."""
        for device in devices:
            held = self.find_conflict(device, holder, is_shared=is_shared)
            if held is not None:
                raise DeviceLeased(device, held)
        kept = {(lease.holder, _place(lease.device)): lease for lease in self.leases}
        serial = self.serial
        for device in dict.fromkeys(devices):
            serial += 1
            # One that was to be made, and now is there.
            planned = kept.pop((holder, _place(replace(device, uuid=""))), None)
            before = kept.pop((holder, _place(device)), planned)
            kept[holder, _place(device)] = LeaseEntry(
                device=device,
                holder=holder,
                serial=serial,
                since_ns=since_ns if before is None else before.since_ns,
                boot_id=boot_id,
                is_shared=is_shared,
                pid=process[0],
                start_ticks=process[1],
                note=note or ("" if before is None else before.note),
            )
        if len(kept) > LEASES_MOST:
            raise LeasesFull(f"{LEASES_MOST} leases are the most; release those whose owners have ended")
        return replace(self, leases=tuple(kept.values()), serial=serial)

    def release(self, holder: LeaseHolder, devices: Iterable[LeaseDevice] | None = None) -> "LeaseTable":
        """Ends the leases of a holder on these devices, by default on all; nothing to end is no error."""
        places = None if devices is None else {_place(one) for one in devices}
        return self._without(
            lease
            for lease in self.leases
            if lease.holder == holder and (places is None or _place(lease.device) in places)
        )

    def reclaim(self, serials: Iterable[int]) -> "LeaseTable":
        """Ends the leases with these numbers; one that was taken again since has another number and stays."""
        gone = frozenset(serials)
        return self._without(lease for lease in self.leases if lease.serial in gone)

    def with_note(self, serial: int, note: str) -> "LeaseTable":
        """Says more of one lease."""
        leases = tuple(replace(one, note=note) if one.serial == serial else one for one in self.leases)
        return replace(self, leases=leases)

    def list_protected(self, gpu_uuid: str) -> frozenset[str]:
        """Returns the UUIDs of the GPU or of its slices that must not be changed."""
        return frozenset(
            lease.device.uuid for lease in self.leases if lease.device.gpu_uuid == gpu_uuid and lease.device.uuid
        )

    def of_engine(self, engine: str) -> Iterator[LeaseEntry]:
        """Yields the leases of one engine."""
        return (lease for lease in self.leases if lease.holder.engine == engine)

    def without_engine(self, engine: str) -> "LeaseTable":
        """Leaves out the leases of one engine."""
        return self._without(self.of_engine(engine))

    def says_same(self, other: "LeaseTable") -> bool:
        """Returns whether another table says the same, whatever its numbers count."""
        return (self.leases, self.adopted_boot) == (other.leases, other.adopted_boot)

    def _without(self, gone: Iterable[LeaseEntry]) -> "LeaseTable":
        ended = {lease.serial for lease in gone}
        if not ended:
            return self
        return replace(self, leases=tuple(lease for lease in self.leases if lease.serial not in ended))


def _place(device: LeaseDevice) -> tuple[str, int, int, str]:
    """What tells the devices of one holder apart; a device that came to be is the one that was to be made."""
    return device.gpu_uuid, device.start, device.size, "" if device.is_whole else device.uuid


def _encode(table: LeaseTable) -> dict[str, Any]:
    return {
        "serial": table.serial,
        "adopted_boot": table.adopted_boot,
        "leases": [asdict(lease) for lease in table.leases],
    }


def _decode(document: Mapping[str, Any]) -> LeaseTable:
    leases = tuple(_lease_in(fields) for fields in document["leases"])
    if len(leases) > LEASES_MOST:
        raise ValueError(f"more than {LEASES_MOST} leases")
    serial = max([int(document["serial"]), *(lease.serial for lease in leases)])
    return LeaseTable(leases=leases, serial=serial, adopted_boot=require_text(document["adopted_boot"]))


def _lease_in(fields: Mapping[str, Any]) -> LeaseEntry:
    device = LeaseDevice(**fields["device"])
    for text in (device.gpu_uuid, device.uuid, *fields["holder"], fields["boot_id"], fields["note"]):
        require_text(text)
    numbers = (fields["serial"], fields["since_ns"], fields["pid"], fields["start_ticks"], device.start, device.size)
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers):
        raise ValueError(f"a lease of {device.gpu_uuid} has a number that is none")
    return LeaseEntry(**{**fields, "device": device, "holder": LeaseHolder(*fields["holder"])})


LEASE_JOURNAL: StateFormat[LeaseTable] = StateFormat(
    title="journal of leases",
    schema=1,
    encode=_encode,
    decode=_decode,
    empty=LeaseTable,
    bytes_most=_BYTES_MOST,
    damage_remedy="leases are adopted again from the jobs, pods and claims that stand",
    write_consequence="no device is leased before",
    ends_line=False,
)
