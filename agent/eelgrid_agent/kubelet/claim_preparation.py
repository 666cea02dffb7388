"""Preparation of DRA resource claims: journal, device creation, leases and CDI specification.

Theory (preparation). To make a claim ready twice is to make it ready once: the entry of the journal says what
it was given, and only what does not stand is made. No claim gets what another holds, whatever
the API server says, since nobody there compares two claims. What a claim holds is leased from
the layouts, so that no other change of layout takes it. To undo a claim never fails for a device
that is still in use: a pod that ends must not wait for a process that does not; what is left is taken
away later, and is refused to others until then by the executor.

Theory (claim journal). An entry is written before anything is changed for it, so that what was made for a claim
is known whatever happens in between, and is struck out after it is undone. What could not
be undone stays as left over, to be tried again. A file that is no journal is put aside and
nothing is guessed from it: what claims hold then is protected by its processes and by the leases in
the layouts' own journal, and nothing that stands is taken for ours to remove.

ClaimJournalError         the journal cannot be read or written, so nothing may be changed

Theory (CDI). A container runtime finds a device by `nvidia.com/gpu=UUID` in the specifications of its
folders. NVIDIA's tools write these for what stood when they ran; an instance that was made a
second ago is in none of them. Ours names such devices and sets the variable that NVIDIA's
container runtime reads, which then mounts the rest; it takes no device that others name, since a
name in two files of one folder is an error to every runtime.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import yaml

from eelgrid_agent.devices.port import DeviceError
from eelgrid_agent.enforce.mig.journal import MigJournalError
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.enforce.mig.runner import MigObservation
from eelgrid_agent.kubelet.claim_allocation import (
    ClaimUnpreparable,
    build_layout_with,
    build_layout_without,
    parse_allocation,
)
from eelgrid_agent.kubelet.resource_slices import (
    GpuPlacement,
    device_name,
    find_geometry,
    find_instance,
    find_uuid,
    parse_gpu_index,
    parse_placement,
    placements_overlap,
)
from eelgrid_agent.state_files import replace_file, set_file_aside
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.dra_api import ClaimReference, PreparedDevice
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuLayout

CDI_KIND = "nvidia.com/gpu"
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
CDI_FILE = "eelgrid-gpu.json"
_CDI_VERSION = "0.5.0"
_CDI_BYTES_MOST = 4 * 2**20
# Readable for the runtime, which is another user's program in some clusters.
_CDI_FILE_MODE = 0o644


def cdi_name(uuid: str) -> str:
    """What a runtime is told."""
    return f"{CDI_KIND}={uuid}"


class CdiFolder:
    """Our file in one folder, beside those of others there and in `folders`."""

    def __init__(self, folder: Path, folders: Iterable[Path] = CDI_FOLDERS) -> None:
        self._path = folder / CDI_FILE
        self._folders = tuple(dict.fromkeys((folder, *folders)))

    def declare_devices(self, uuids: Iterable[str]) -> None:
        """From now on our file names these, as far as no other does. Raises OSError."""
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
            replace_file(self._path, content)
            self._path.chmod(_CDI_FILE_MODE)

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


_SCHEMA = 1
_BYTES_MOST = 4 * 2**20


class ClaimJournalError(Exception):
    """The journal cannot be read or written; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDevice:
    """One device of a claim; `uuid` is empty until it stands, `is_made` where we made its instance."""

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


class ClaimJournal:
    """A file of the state directory; without a path nothing outlives the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: ClaimJournalState | None = None
        # Of a file that was put aside.
        self.problem = ""

    @property
    def state(self) -> ClaimJournalState:
        """What was stored last. Raises ClaimsUnkept."""
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def store(self, kept: ClaimJournalState) -> None:
        """On return it survives a power cut. Raises ClaimsUnkept."""
        if self._path is not None and kept != self._kept:
            claims = [asdict(claim) for _, claim in sorted(kept.claims.items())]
            content = json.dumps({"schema": _SCHEMA, "claims": claims, "left": list(kept.left)}, indent=1)
            try:
                replace_file(self._path, content.encode())
            except OSError as error:
                raise ClaimJournalError(
                    f"{self._path}: {error.strerror}; make room and let the agent write it"
                ) from error
        self._kept = kept

    def _read(self) -> ClaimJournalState:
        empty = ClaimJournalState(claims={})
        if self._path is None:
            return empty
        try:
            with self._path.open("rb") as file:
                content = file.read(_BYTES_MOST + 1)
        except FileNotFoundError:
            return empty
        except OSError as error:
            raise ClaimJournalError(f"{self._path}: {error.strerror}; let the agent read it") from error
        try:
            return _decode_journal(content)
        except (ValueError, KeyError, TypeError) as error:
            self.problem = (
                f"{self._path} is no journal of claims ({error}); it is kept as {self._put_aside(self._path)}"
            )
            return empty

    @staticmethod
    def _put_aside(path: Path) -> Path:
        try:
            return set_file_aside(path)
        except OSError as error:
            raise ClaimJournalError(f"{path}: is no journal, and {error.strerror}; remove it") from error


def _decode_journal(content: bytes) -> ClaimJournalState:
    if len(content) > _BYTES_MOST:
        raise ValueError(f"it has more than {_BYTES_MOST} bytes")
    found = json.loads(content)
    if found["schema"] != _SCHEMA:
        raise ValueError(f"schema {found['schema']}")
    claims = [
        PreparedClaim(**{**claim, "devices": tuple(ClaimDevice(**one) for one in claim["devices"])})
        for claim in found["claims"]
    ]
    return ClaimJournalState(claims={claim.uid: claim for claim in claims}, left=tuple(map(str, found["left"])))


_LOG = logging.getLogger("eelgrid.agent")


class ClaimDevices(Protocol):
    """The node's devices, asked now."""

    def list_gpus(self) -> Sequence[Gpu]:
        """All devices as they stand."""

    def read_device(self, uuid: str) -> MigObservation:
        """One device, and what of it may not be touched."""

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """How the driver lets it be cut."""

    def apply_layout(self, layout: GpuLayout) -> ApplyResult:
        """Brings a device to a layout and keeps it there."""

    def lease_gpus(self, uuids: Collection[str]) -> bool:
        """Claims hold these from now on, and nothing else; False where that could not be kept."""


class ClaimPreparer:
    """The claims of one node. `cannot_change` says why no device may be changed here, or nothing."""

    def __init__(
        self,
        node_name: str,
        devices: ClaimDevices,
        journal: ClaimJournal,
        catalogue: Catalogue,
        *,
        cannot_change: str = "",
        cdi: CdiFolder | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
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
        """What is ready, by uid. Raises ClaimsUnkept."""
        return self._journal.state.claims

    def restore_leases(self) -> None:
        """Holds again what was held before the agent started anew, and takes away what was left."""
        try:
            kept = self._journal.state
            if self._journal.problem:
                _LOG.warning("event=claims_unknown reason=%r", self._journal.problem)
        except ClaimJournalError as error:
            _LOG.warning("event=claims_unknown reason=%r", str(error))
            return
        # Where nothing is claimed, nothing is leased but what assignments hold.
        self._is_leased = not kept.claims
        self.collect_leftovers()

    def prepare_claim(self, asked: ClaimReference, claim: Mapping[str, Any] | None) -> tuple[PreparedDevice, ...]:
        """The devices of a claim, standing and held; `claim` may lack where it is in the journal. Raises ClaimRefused."""
        try:
            return self._ready(asked, claim)
        except ClaimJournalError as error:
            raise ClaimUnpreparable(f"nothing is changed before it can be written down: {error}") from error
        except (DeviceError, TransitionRefused, MigJournalError, OSError) as error:
            raise ClaimUnpreparable(str(error)) from error

    def unprepare_claim(self, asked: ClaimReference) -> None:
        """The claim holds nothing any more; what was made for it goes. Raises ClaimRefused."""
        try:
            kept = self._journal.state
            entry = kept.claims.get(asked.uid)
            if entry is None:
                return
            rest = {uid: one for uid, one in kept.claims.items() if uid != asked.uid}
            made = tuple(one.device for one in entry.devices if one.is_made)
            self._journal.store(ClaimJournalState(claims=rest, left=tuple(dict.fromkeys((*kept.left, *made)))))
            self._is_leased = False
        except ClaimJournalError as error:
            raise ClaimUnpreparable(f"nothing is changed before it can be written down: {error}") from error
        _LOG.info("event=claim_undone claim=%s/%s uid=%s", asked.namespace, asked.name, asked.uid)
        self.collect_leftovers()

    def collect_leftovers(self) -> None:
        """Leases what is held and no more, and takes away what is left over and out of use; what cannot be done waits."""
        try:
            kept = self._journal.state
            if not self._is_leased:
                self._lease(kept)
            held = [place for _, place in self._held(kept)]
            left = tuple(name for name in kept.left if not self._is_gone(name, held))
            if left != kept.left:
                self._journal.store(replace(kept, left=left))
        except (ClaimJournalError, ClaimUnpreparable, DeviceError, OSError) as error:
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
                    f"{device_name(theirs)} is held there by claim {who}; free it, or allocate anew"
                )
        for number, (gpu, place) in enumerate(places):
            others = [other for _, other in held] + [other for _, other in places]
            entry = self._create_device(entry, number, gpu, place, others)
        self._lease(self._journal.state)
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
                    f"{given.device} does not stand, and nothing is changed here ({self._cannot_change}); "
                    "allocate what stands, or let the agent change devices"
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
                    f"{given.device} could not be made ({result.rule or 'driver'}): {result.detail}"
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
        except (TransitionRefused, DeviceError, ClaimUnpreparable, MigJournalError):
            return False
        result = self._devices.apply_layout(layout)
        self._changed()
        if result.status is not ApplyStatus.APPLIED:
            _LOG.warning("event=device_left device=%s reason=%r", name, result.detail)
        return result.status is ApplyStatus.APPLIED

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
                "what claims hold could not be leased; see the agent's log for its driver and journal"
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
