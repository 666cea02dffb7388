"""Preparation of DRA resource claims: allocation, device creation, journal, leases and CDI specification.

Preparing a claim twice has the effect of preparing it once: its journal entry says what it was given, and only devices
that are missing are created. No claim receives what another one holds, whatever the API server says, because nothing
there compares two claims, nor what another engine of the node has leased (enforce/device_leases.py): a claim takes its
lease before anything is changed for it. What a claim holds is leased from the MIG layouts, too, so that no other change of
layout removes it. Unpreparing never fails for a device that is in use, since a pod that ends must not wait for a process that does
not: such a device is recorded as left over and removed later, and until then the MIG service refuses to reuse it.

The layout for a requested device is the existing one plus the device: instances in its way that no claim holds are
removed, and all others stay, used or not. Whether an instance in the way is in use is decided by the MIG service, which
never touches what a process or a lease holds. Instances of another origin are not mentioned in the layout, so they are
never taken for the agent's own.

A journal entry is written before anything is changed for it and removed after the claim is unprepared. From a damaged
journal nothing is guessed: what claims hold then is protected by their processes and by the leases in the MIG journal.

A container runtime finds a device by `nvidia.com/gpu=UUID` in the CDI specifications of its folders. NVIDIA's tools
write these for the devices that existed when they ran; an instance created since is in none of them. The agent's
specification names such devices and sets the variable that NVIDIA's container runtime reads, which mounts the rest. It
leaves out devices that other files name, since a name in two files of one folder is an error to every runtime.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eelgrid_agent.devices.port import ControlPort, DeviceError, DevicePort
from eelgrid_agent.enforce.device_leases import KUBELET_HOLDER, DeviceLeases
from eelgrid_agent.enforce.lease_table import KUBERNETES_ENGINE, LeaseDevice, LeaseHolder, LeaseRefused
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.enforce.mig.runner import MigObservation
from eelgrid_agent.kubelet.resource_slices import (
    DRA_DRIVER,
    GpuPlacement,
    device_name,
    find_geometry,
    find_instance,
    find_uuid,
    is_instance_held,
    parse_gpu_index,
    parse_placement,
    placements_overlap,
)
from eelgrid_agent.state_files import (
    MemoryState,
    StateDamaged,
    StateFile,
    StateFileError,
    StateFormat,
    StateStore,
    replace_file,
)
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.kubelet_api import ClaimReference, PreparedDevice
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuInstance, GpuLayout, WantedInstance
from eelgrid_protos.values import dataclass

_RESULTS_MOST = 32


class ClaimUnpreparable(Exception):
    """The claim cannot be prepared here; the message says what to do."""


class ClaimResult(NamedTuple):
    """One device of a claim, by its name in our pool, and the request that it serves."""

    request: str
    device: str


def parse_allocation(claim: Mapping[str, Any], *, uid: str, node_name: str) -> tuple[ClaimResult, ...]:
    """Returns the devices of this node that are allocated to a ResourceClaim; raises ClaimUnpreparable."""
    found = claim.get("metadata", {}).get("uid", "")
    if found != uid:
        raise ClaimUnpreparable(f"the claim of this name has uid {found}, not {uid}; it was recreated: delete the pod")
    allocation = claim.get("status", {}).get("allocation")
    if not allocation:
        raise ClaimUnpreparable("the claim is not allocated yet; the controller allocates it, and the kubelet retries")
    results = [one for one in allocation.get("devices", {}).get("results", ()) if one.get("driver") == DRA_DRIVER]
    if not results:
        raise ClaimUnpreparable(
            f"no device of {DRA_DRIVER} is allocated to the claim; its allocation names other drivers"
        )
    if len(results) > _RESULTS_MOST:
        raise ClaimUnpreparable(f"{len(results)} devices are allocated to the claim; {_RESULTS_MOST} are the most")
    for one in results:
        if one.get("pool") != node_name:
            raise ClaimUnpreparable(
                f"device {one.get('device')} is of pool {one.get('pool')}, and this node is {node_name}"
            )
        if one.get("adminAccess"):
            raise ClaimUnpreparable(
                f"device {one.get('device')} is requested with adminAccess, which this driver does not grant"
            )
    return tuple(ClaimResult(str(one["request"]), str(one["device"])) for one in results)


def build_layout_with(
    gpu: Gpu,
    geometry: MigGeometry,
    place: GpuPlacement,
    *,
    held: Collection[GpuPlacement],
    foreign: Collection[int] = frozenset(),
) -> GpuLayout:
    """Returns the layout with this place beside all that claims hold; raises ClaimUnpreparable."""
    if place.profile is None:
        return GpuLayout(gpu_uuid=gpu.uuid)
    profile = geometry.profile_by_id(place.profile.id)
    if profile is None or place.start not in profile.starts:
        raise ClaimUnpreparable(f"the driver of GPU {gpu.index} has no {place.profile.name} at {place.start}")
    kept = [one for one in gpu.gpu_instances if one.id not in foreign and not _is_at(one, place)]
    new = (profile, place.start)
    # What nobody claims gives way, the smallest number of them: first what overlaps, then what is too much together.
    kept = [one for one in kept if is_instance_held(one, held) or not _is_in_the_way(one, place)]
    for spare in [one for one in kept if not is_instance_held(one, held)]:
        if geometry.conflict([new, *_known(kept, geometry)]) is None:
            break
        kept.remove(spare)
    instances = [*_wanted(kept, geometry), WantedInstance(profile=profile.name, start=place.start)]
    return _layout(gpu, instances)


def build_layout_without(
    gpu: Gpu, geometry: MigGeometry, place: GpuPlacement, *, foreign: Collection[int] = frozenset()
) -> GpuLayout:
    """Returns the existing layout without the instance in this place; MIG mode stays."""
    kept = [one for one in gpu.gpu_instances if one.id not in foreign and not _is_at(one, place)]
    return _layout(gpu, _wanted(kept, geometry))


def _layout(gpu: Gpu, instances: Iterable[WantedInstance]) -> GpuLayout:
    by_start = sorted(instances, key=lambda one: one.start)
    return GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=True, instances=tuple(by_start))


def _is_at(instance: GpuInstance, place: GpuPlacement) -> bool:
    return is_instance_held(instance, (place,))


def _is_in_the_way(instance: GpuInstance, place: GpuPlacement) -> bool:
    assert place.profile is not None
    return instance.start < place.start + place.profile.size and place.start < instance.start + instance.size


def _known(instances: Iterable[GpuInstance], geometry: MigGeometry) -> list[tuple[Any, int]]:
    profiles = ((geometry.profile_by_id(one.profile_id), one.start) for one in instances)
    return [(profile, start) for profile, start in profiles if profile is not None]


def _wanted(instances: Iterable[GpuInstance], geometry: MigGeometry) -> list[WantedInstance]:
    wanted = []
    for one in instances:
        profile = geometry.profile_by_id(one.profile_id)
        if profile is None:
            raise ClaimUnpreparable(
                f"instance {one.profile} at {one.start} is of no profile that the driver lists; remove it"
            )
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        compute = tuple(sorted((slices.get(child.profile_id, 0) for child in one.compute_instances), reverse=True))
        wanted.append(WantedInstance(profile=profile.name, start=one.start, compute_slices=compute))
    return wanted


CDI_KIND = "nvidia.com/gpu"
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
CDI_FILE = "eelgrid-gpu.json"
_CDI_VERSION = "0.5.0"
_CDI_BYTES_MOST = 4 * 2**20
# Readable for the runtime, which is another user's program in some clusters.
_CDI_FILE_MODE = 0o644


def cdi_name(uuid: str) -> str:
    """Returns the CDI name of a device, as the container runtime expects it."""
    return f"{CDI_KIND}={uuid}"


class CdiFolder:
    """The agent's CDI file in one folder, beside those of others there and in `folders`."""

    def __init__(self, folder: Path, folders: Iterable[Path] = CDI_FOLDERS) -> None:
        self._path = folder / CDI_FILE
        self._folders = tuple(dict.fromkeys((folder, *folders)))

    def declare_devices(self, uuids: Iterable[str]) -> None:
        """Replaces the names in the file by these, except those that other files have. Raises OSError."""
        named = self._read_named_devices()
        devices = [
            {"name": uuid, "containerEdits": {"env": [f"NVIDIA_VISIBLE_DEVICES={uuid}"]}}
            for uuid in sorted(set(uuids) - named)
        ]
        if not devices:
            self._path.unlink(missing_ok=True)
            return
        content = json.dumps({"cdiVersion": _CDI_VERSION, "kind": CDI_KIND, "devices": devices}, indent=1).encode()
        if not self._path.exists() or self._path.read_bytes() != content:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content, mode=_CDI_FILE_MODE)

    def _read_named_devices(self) -> set[str]:
        found: set[str] = set()
        for folder in self._folders:
            for path in sorted(folder.glob("*")) if folder.is_dir() else ():
                if path.suffix in (".json", ".yaml", ".yml") and path != self._path:
                    found |= _read_device_names(path)
        return found


def _read_device_names(path: Path) -> set[str]:
    """The devices of our kind in a specification; none where it is none."""
    try:
        with path.open("rb") as file:
            text = file.read(_CDI_BYTES_MOST)
        document: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if document["kind"] != CDI_KIND:
            return set()
        return {str(one["name"]) for one in document["devices"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDevice:
    """One device of a claim; `uuid` is empty until it exists, `is_made` where the agent created its instance."""

    request: str
    device: str
    uuid: str = ""
    is_made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClaim:
    """One claim, by what the kubelet calls it."""

    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimJournalState:
    """All that is kept: claims by uid, and devices that we made and could not take away."""

    claims: Mapping[str, PreparedClaim]
    left: tuple[str, ...] = ()


def _encode_claims(kept: ClaimJournalState) -> dict[str, Any]:
    return {"claims": [asdict(claim) for _, claim in sorted(kept.claims.items())], "left": list(kept.left)}


def _decode_claims(document: Mapping[str, Any]) -> ClaimJournalState:
    claims = [
        PreparedClaim(**{**claim, "devices": tuple(ClaimDevice(**one) for one in claim["devices"])})
        for claim in document["claims"]
    ]
    return ClaimJournalState(claims={claim.uid: claim for claim in claims}, left=tuple(map(str, document["left"])))


CLAIM_JOURNAL: StateFormat[ClaimJournalState] = StateFormat(
    title="journal of claims",
    schema=1,
    encode=_encode_claims,
    decode=_decode_claims,
    empty=lambda: ClaimJournalState(claims={}),
    bytes_most=4 * 2**20,
    damage_remedy="devices that exist are left as they are",
    write_consequence="no claim is prepared before",
    ends_line=False,
)


class ClaimJournal:
    """The claims of this node, in a file of the state directory, or in memory without a path."""

    def __init__(self, path: Path | None) -> None:
        self._file: StateStore[ClaimJournalState] = (
            MemoryState(ClaimJournalState(claims={})) if path is None else StateFile(path, CLAIM_JOURNAL)
        )
        self._kept: ClaimJournalState | None = None
        # What was wrong with a file that was moved aside.
        self.problem = ""

    @property
    def state(self) -> ClaimJournalState:
        """The state that was stored last; empty after a damaged file was moved aside. Raises StateFileError."""
        if self._kept is None:
            try:
                self._kept = self._file.load()
            except StateDamaged as damaged:
                self.problem, self._kept = str(damaged), ClaimJournalState(claims={})
        return self._kept

    def store(self, kept: ClaimJournalState) -> None:
        """Replaces the state where it changed; on return it survives a power cut. Raises StateUnwritable."""
        if kept != self._kept:
            self._file.store(kept)
            self._kept = kept


_LOG = logging.getLogger("eelgrid.agent")


class LayoutDevices:
    """The devices of the node, read when called, behind the service that keeps their layouts."""

    def __init__(self, device: DevicePort, control: ControlPort, layouts: MigService) -> None:
        self._device = device
        self._control = control
        self._layouts = layouts

    def list_gpus(self) -> Sequence[Gpu]:
        """All devices in their current state."""
        return self._device.gpus()

    def read_device(self, uuid: str) -> MigObservation:
        """Reads one device, and what of it must not be touched."""
        return self._layouts.executor.observe_device(uuid)

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """The MIG geometry that the driver offers."""
        return self._control.mig_geometry(uuid)

    def apply_layout(self, layout: GpuLayout) -> ApplyResult:
        """Brings a device to a layout and keeps it there."""
        return self._layouts.apply_layout(layout)

    def lease_gpus(self, uuids: Collection[str]) -> bool:
        """Leases these to claims, and nothing else; False where that could not be recorded."""
        return self._layouts.lease_devices(uuids)


class ClaimPreparer:
    """Prepares the claims of one node. `cannot_change` says why no device may be changed here, or nothing."""

    def __init__(
        self,
        node_name: str,
        devices: LayoutDevices,
        journal: ClaimJournal,
        catalogue: Catalogue,
        *,
        cannot_change: str = "",
        cdi: CdiFolder | None = None,
        changed: Callable[[], None] = lambda: None,
        leases: DeviceLeases | None = None,
    ) -> None:
        """`leases` are those of all engines of the node; None where there is no other."""
        self._leases = leases
        # Whether the claims that stand were leased since the start.
        self.is_restored = False
        self._node_name = node_name
        self._devices = devices
        self._journal = journal
        self._catalogue = catalogue
        self._cannot_change = cannot_change
        self._cdi = cdi
        self._changed = changed
        # Whether what claims hold is what the layouts' journal says; to lease too much for a while harms nobody.
        self._is_leased = True

    def prepared_claims(self) -> Mapping[str, PreparedClaim]:
        """The prepared claims by uid. Raises StateFileError."""
        return self._journal.state.claims

    def restore_leases(self) -> None:
        """Leases again what claims hold after a restart of the agent, and removes what was left over."""
        self._restore_leases()
        self.is_restored = True

    def _restore_leases(self) -> None:
        try:
            kept = self._journal.state
            if self._journal.problem:
                _LOG.warning("event=claims_unknown reason=%r", self._journal.problem)
        except StateFileError as error:
            _LOG.warning("event=claims_unknown reason=%r", str(error))
            return
        # Where nothing is claimed, nothing is leased but what assignments hold.
        self._is_leased = not kept.claims
        self._adopt_leases(kept)
        self.collect_leftovers()

    def prepare_claim(self, asked: ClaimReference, claim: Mapping[str, Any] | None) -> tuple[PreparedDevice, ...]:
        """Prepares a claim and returns its devices; `claim` may be None where it is in the journal.

        Raises ClaimUnpreparable.
        """
        try:
            return self._ready(asked, claim)
        except StateFileError as error:
            raise ClaimUnpreparable(f"nothing is changed while the journal is unavailable: {error}") from error
        except (DeviceError, TransitionRefused, OSError) as error:
            self._release_unused(asked)
            raise ClaimUnpreparable(str(error)) from error
        except ClaimUnpreparable:
            self._release_unused(asked)
            raise

    def unprepare_claim(self, asked: ClaimReference) -> None:
        """Unprepares a claim and removes what was created for it. Raises ClaimUnpreparable."""
        try:
            kept = self._journal.state
            entry = kept.claims.get(asked.uid)
            if entry is None:
                self._release_lease(asked)
                return
            rest = {uid: one for uid, one in kept.claims.items() if uid != asked.uid}
            made = tuple(one.device for one in entry.devices if one.is_made)
            self._journal.store(ClaimJournalState(claims=rest, left=tuple(dict.fromkeys((*kept.left, *made)))))
            self._is_leased = False
        except StateFileError as error:
            raise ClaimUnpreparable(f"nothing is changed while the journal is unavailable: {error}") from error
        self._release_lease(asked)
        _LOG.info("event=claim_undone claim=%s/%s uid=%s", asked.namespace, asked.name, asked.uid)
        self.collect_leftovers()

    def collect_leftovers(self) -> None:
        """Leases exactly what claims hold, and removes unused leftovers; what fails is retried later."""
        try:
            kept = self._journal.state
            if not self._is_leased:
                self._lease(kept)
            held = [place for _, place in self._held(kept)]
            left = tuple(name for name in kept.left if not self._is_gone(name, held))
            if left != kept.left:
                self._journal.store(replace(kept, left=left))
        except (StateFileError, ClaimUnpreparable, DeviceError, OSError) as error:
            _LOG.warning("event=claims_untended reason=%r", str(error))

    # Making

    def _ready(self, asked: ClaimReference, claim: Mapping[str, Any] | None) -> tuple[PreparedDevice, ...]:
        entry = self._journal.state.claims.get(asked.uid)
        if entry is None:
            if claim is None:
                raise ClaimUnpreparable("the claim is not known here and could not be read")
            results = parse_allocation(claim, uid=asked.uid, node_name=self._node_name)
            devices = tuple(ClaimDevice(request=one.request, device=one.device) for one in results)
            entry = PreparedClaim(uid=asked.uid, namespace=asked.namespace, name=asked.name, devices=devices)
        held = [(other, place) for other, place in self._held(self._journal.state) if other.uid != entry.uid]
        places = [self._parse_placement(one.device) for one in entry.devices]
        for (other, theirs), (_, ours) in product(held, places):
            if placements_overlap(theirs, ours):
                who = f"{other.namespace}/{other.name}"
                raise ClaimUnpreparable(
                    f"{device_name(theirs)} is held by claim {who}; release that claim, or allocate another device"
                )
        self._take_lease(entry, places)
        for number, (gpu, place) in enumerate(places):
            others = [other for _, other in held] + [other for _, other in places]
            entry = self._create_device(entry, number, gpu, place, others)
        self._lease(self._journal.state)
        # What was made for it has its UUID now, by which other changes of the layout know it.
        self._take_lease(entry, [self._parse_placement(one.device) for one in entry.devices])
        _LOG.info(
            "event=claim_ready claim=%s/%s uid=%s devices=%s",
            asked.namespace,
            asked.name,
            asked.uid,
            ",".join(one.uuid for one in entry.devices),
        )
        return tuple(
            PreparedDevice(
                requests=(one.request,), pool=self._node_name, device=one.device, cdi_ids=(cdi_name(one.uuid),)
            )
            for one in entry.devices
        )

    def _create_device(
        self, entry: PreparedClaim, number: int, gpu: Gpu, place: GpuPlacement, others: Collection[GpuPlacement]
    ) -> PreparedClaim:
        """The entry with one more device that stands."""
        given, uuid = entry.devices[number], find_uuid(gpu, place)
        if not uuid:
            if self._cannot_change:
                raise ClaimUnpreparable(
                    f"{given.device} does not exist, and this agent changes no devices ({self._cannot_change}); "
                    "allocate an existing device, or let the agent change devices"
                )
            look = self._devices.read_device(gpu.uuid)
            layout = build_layout_with(
                look.gpu, self._devices.mig_geometry(gpu.uuid), place, held=others, foreign=look.foreign
            )
            is_made = given.is_made or (place.profile is not None and find_instance(look.gpu, place) is None)
            entry = self._write(entry, number, replace(given, uuid="", is_made=is_made))
            result = self._devices.apply_layout(layout)
            self._changed()
            uuid = find_uuid(self._gpu(place.gpu_index), place)
            if result.status is not ApplyStatus.APPLIED or not uuid:
                raise ClaimUnpreparable(
                    f"{given.device} could not be created ({result.rule or 'driver'}): {result.detail}"
                )
        return self._write(entry, number, replace(entry.devices[number], uuid=uuid))

    def _write(self, entry: PreparedClaim, number: int, given: ClaimDevice) -> PreparedClaim:
        devices = (*entry.devices[:number], given, *entry.devices[number + 1 :])
        entry = replace(entry, devices=devices)
        kept = self._journal.state
        left = tuple(name for name in kept.left if name != given.device)
        if len(left) < len(kept.left):
            # It was ours before and still is.
            entry = replace(entry, devices=(*devices[:number], replace(given, is_made=True), *devices[number + 1 :]))
        self._journal.store(ClaimJournalState(claims={**kept.claims, entry.uid: entry}, left=left))
        return entry

    # Unmaking

    def _is_gone(self, name: str, held: Collection[GpuPlacement]) -> bool:
        """Whether a device that is left over is no more, or somebody's again."""
        try:
            gpu, place = self._parse_placement(name)
        except ClaimUnpreparable:
            return True
        if place in held or find_instance(gpu, place) is None:
            return place not in held
        if self._cannot_change:
            return False
        try:
            look = self._devices.read_device(gpu.uuid)
            layout = build_layout_without(look.gpu, self._devices.mig_geometry(gpu.uuid), place, foreign=look.foreign)
        except (TransitionRefused, DeviceError, ClaimUnpreparable, StateFileError):
            return False
        result = self._devices.apply_layout(layout)
        self._changed()
        if result.status is not ApplyStatus.APPLIED:
            _LOG.warning("event=device_left device=%s reason=%r", name, result.detail)
        return result.status is ApplyStatus.APPLIED

    # Leases among the engines of the node

    def _take_lease(self, entry: PreparedClaim, places: Iterable[tuple[Gpu, GpuPlacement]]) -> None:
        if self._leases is None:
            return
        try:
            self._leases.take_devices(_lease_holder(entry), [_lease_device(*one) for one in places])
        except LeaseRefused as refused:
            raise ClaimUnpreparable(str(refused)) from refused

    def _release_lease(self, claim: PreparedClaim | ClaimReference) -> None:
        if self._leases is not None:
            self._leases.release(_lease_holder(claim))

    def _release_unused(self, claim: ClaimReference) -> None:
        """Ends the lease of a claim for which nothing was recorded: the kubelet may never ask to unprepare it."""
        if claim.uid not in self._journal.state.claims:
            self._release_lease(claim)

    def _adopt_leases(self, kept: ClaimJournalState) -> None:
        """Leases what claims hold if the journal of leases was lost, and ends the leases of claims that are gone."""
        if self._leases is None:
            return
        for entry, place in self._held(kept):
            self._leases.adopt(_lease_holder(entry), [_lease_device(self._gpu(place.gpu_index), place)])
        owners = {_lease_holder(entry).owner for entry in kept.claims.values()}
        self._leases.keep_only(KUBERNETES_ENGINE, owners | {KUBELET_HOLDER.owner})

    # What is known

    def _held(self, kept: ClaimJournalState) -> Iterator[tuple[PreparedClaim, GpuPlacement]]:
        for entry in kept.claims.values():
            for one in entry.devices:
                try:
                    yield entry, self._parse_placement(one.device)[1]
                except ClaimUnpreparable:
                    # Its GPU is gone; nobody else can have it either.
                    continue

    def _lease(self, kept: ClaimJournalState) -> None:
        self._is_leased = False
        uuids = [one.uuid for entry in kept.claims.values() for one in entry.devices if one.uuid]
        if not self._devices.lease_gpus(uuids):
            raise ClaimUnpreparable(
                "the devices of claims could not be leased; see the agent's log for its driver and journal"
            )
        self._is_leased = True
        if self._cdi is not None:
            self._cdi.declare_devices(uuids)

    def _parse_placement(self, name: str) -> tuple[Gpu, GpuPlacement]:
        index = parse_gpu_index(name)
        gpu = None if index is None else self._gpu_or_none(index)
        if gpu is None:
            raise ClaimUnpreparable(f"this node has no device {name}; its slices were published for other GPUs")
        place = parse_placement(name, find_geometry(gpu, self._catalogue))
        if place is None:
            raise ClaimUnpreparable(f"GPU {gpu.index} ({gpu.product}) has no device {name}; allocate one of its slices")
        return gpu, place

    def _gpu(self, index: int) -> Gpu:
        gpu = self._gpu_or_none(index)
        if gpu is None:
            raise ClaimUnpreparable(f"GPU {index} is gone")
        return gpu

    def _gpu_or_none(self, index: int) -> Gpu | None:
        return next((gpu for gpu in self._devices.list_gpus() if gpu.index == index), None)


def _lease_holder(claim: PreparedClaim | ClaimReference) -> LeaseHolder:
    return LeaseHolder(KUBERNETES_ENGINE, f"claim {claim.namespace}/{claim.name} {claim.uid}")


def _lease_device(gpu: Gpu, place: GpuPlacement) -> LeaseDevice:
    """The device of a placement; without a UUID where it does not exist yet."""
    size = 0 if place.profile is None else place.profile.size
    return LeaseDevice(gpu_uuid=gpu.uuid, uuid=find_uuid(gpu, place), start=place.start, size=size)
