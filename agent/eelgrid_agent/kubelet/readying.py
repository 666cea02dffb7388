"""Claims made ready on this node's devices, and undone.

Owns the order of it: what is written down, made, held and named. Must not know sockets or the
API server. Every method blocks on the driver and the disk, so all belong on the one thread on
which layouts are changed.

Theory. To make a claim ready twice is to make it ready once: the entry of the journal says what
it was given, and only what does not stand is made. No claim gets what another holds, whatever
the API server says, since nobody there compares two claims. What a claim holds is leased from
the layouts, so that no other change of layout takes it. To undo a claim never fails for a device
that is still in use: a pod that ends must not wait for a process that does not; what is left is taken
away later, and is refused to others until then by the executor.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

from eelgrid_agent.device import DeviceError
from eelgrid_agent.kubelet.cdi import CdiFolder, cdi_name
from eelgrid_agent.kubelet.claim_journal import ClaimJournal, ClaimsUnkept, GivenDevice, Kept, ReadyClaim
from eelgrid_agent.kubelet.claims import ClaimRefused, allocated_of, layout_with, layout_without
from eelgrid_agent.kubelet.places import Place, device_name, gpu_index_of, overlaps, place_of, standing_at, uuid_at
from eelgrid_agent.kubelet.slices import geometry_of
from eelgrid_agent.mig.journal import JournalError
from eelgrid_agent.mig.partitioner import TransitionRefused
from eelgrid_agent.mig.runner import Look
from eelgrid_protos.catalogue import Catalogue, MigGeometry
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuLayout
from eelgrid_protos.resource_claims import ClaimAsked, PreparedDevice

__all__ = ["Devices", "Readying"]

_LOG = logging.getLogger("eelgrid.agent")


class Devices(Protocol):
    """The node's devices, asked now."""

    def gpus(self) -> Sequence[Gpu]:
        """All devices as they stand."""

    def look(self, uuid: str) -> Look:
        """One device, and what of it may not be touched."""

    def geometry(self, uuid: str) -> MigGeometry:
        """How the driver lets it be cut."""

    def apply(self, layout: GpuLayout) -> ApplyResult:
        """Brings a device to a layout and keeps it there."""

    def lease(self, uuids: Collection[str]) -> bool:
        """Claims hold these from now on, and nothing else; False where that could not be kept."""


class Readying:
    """The claims of one node. `cannot_change` says why no device may be changed here, or nothing."""

    def __init__(
        self, node_name: str, devices: Devices, journal: ClaimJournal, catalogue: Catalogue, *,
        cannot_change: str = "", cdi: CdiFolder | None = None, changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._node_name = node_name
        self._devices = devices
        self._journal = journal
        self._catalogue = catalogue
        self._cannot_change = cannot_change
        self._cdi = cdi
        self._changed = changed
        # Whether what claims hold is what the layouts' journal says; to lease too much for a while harms nobody.
        self._is_leased = True

    def claims(self) -> Mapping[str, ReadyClaim]:
        """What is ready, by uid. Raises ClaimsUnkept."""
        return self._journal.kept.claims

    def start(self) -> None:
        """Holds again what was held before the agent started anew, and takes away what was left."""
        try:
            kept = self._journal.kept
            if self._journal.problem:
                _LOG.warning("event=claims_unknown reason=%r", self._journal.problem)
        except ClaimsUnkept as error:
            _LOG.warning("event=claims_unknown reason=%r", str(error))
            return
        # Where nothing is claimed, nothing is leased but what assignments hold.
        self._is_leased = not kept.claims
        self.tidy()

    def ready(self, asked: ClaimAsked, claim: Mapping[str, Any] | None) -> tuple[PreparedDevice, ...]:
        """The devices of a claim, standing and held; `claim` may lack where it is in the journal. Raises ClaimRefused."""
        try:
            return self._ready(asked, claim)
        except ClaimsUnkept as error:
            raise ClaimRefused(f"nothing is changed before it can be written down: {error}") from error
        except (DeviceError, TransitionRefused, JournalError, OSError) as error:
            raise ClaimRefused(str(error)) from error

    def undo(self, asked: ClaimAsked) -> None:
        """The claim holds nothing any more; what was made for it goes. Raises ClaimRefused."""
        try:
            kept = self._journal.kept
            entry = kept.claims.get(asked.uid)
            if entry is None:
                return
            rest = {uid: one for uid, one in kept.claims.items() if uid != asked.uid}
            made = tuple(one.device for one in entry.devices if one.is_made)
            self._journal.store(Kept(claims=rest, left=tuple(dict.fromkeys((*kept.left, *made)))))
            self._is_leased = False
        except ClaimsUnkept as error:
            raise ClaimRefused(f"nothing is changed before it can be written down: {error}") from error
        _LOG.info("event=claim_undone claim=%s/%s uid=%s", asked.namespace, asked.name, asked.uid)
        self.tidy()

    def tidy(self) -> None:
        """Leases what is held and no more, and takes away what is left over and out of use; what cannot be done waits."""
        try:
            kept = self._journal.kept
            if not self._is_leased:
                self._lease(kept)
            held = [place for _, place in self._held(kept)]
            left = tuple(name for name in kept.left if not self._is_gone(name, held))
            if left != kept.left:
                self._journal.store(replace(kept, left=left))
        except (ClaimsUnkept, ClaimRefused, DeviceError, OSError) as error:
            _LOG.warning("event=claims_untended reason=%r", str(error))

    # Making

    def _ready(self, asked: ClaimAsked, claim: Mapping[str, Any] | None) -> tuple[PreparedDevice, ...]:
        entry = self._journal.kept.claims.get(asked.uid)
        if entry is None:
            if claim is None:
                raise ClaimRefused("the claim is not known here and could not be read")
            results = allocated_of(claim, uid=asked.uid, node_name=self._node_name)
            devices = tuple(GivenDevice(request=one.request, device=one.device) for one in results)
            entry = ReadyClaim(uid=asked.uid, namespace=asked.namespace, name=asked.name, devices=devices)
        held = [(other, place) for other, place in self._held(self._journal.kept) if other.uid != entry.uid]
        places = [self._placed(one.device) for one in entry.devices]
        for (other, theirs), (_, ours) in product(held, places):
            if overlaps(theirs, ours):
                who = f"{other.namespace}/{other.name}"
                raise ClaimRefused(f"{device_name(theirs)} is held there by claim {who}; free it, or allocate anew")
        for number, (gpu, place) in enumerate(places):
            others = [other for _, other in held] + [other for _, other in places]
            entry = self._stood(entry, number, gpu, place, others)
        self._lease(self._journal.kept)
        _LOG.info(
            "event=claim_ready claim=%s/%s uid=%s devices=%s", asked.namespace, asked.name, asked.uid,
            ",".join(one.uuid for one in entry.devices),
        )  # fmt: skip
        return tuple(
            PreparedDevice(
                requests=(one.request,), pool=self._node_name, device=one.device, cdi_ids=(cdi_name(one.uuid),)
            )
            for one in entry.devices
        )

    def _stood(self, entry: ReadyClaim, number: int, gpu: Gpu, place: Place, others: Collection[Place]) -> ReadyClaim:
        """The entry with one more device that stands."""
        given, uuid = entry.devices[number], uuid_at(gpu, place)
        if not uuid:
            if self._cannot_change:
                raise ClaimRefused(
                    f"{given.device} does not stand, and nothing is changed here ({self._cannot_change}); "
                    "allocate what stands, or let the agent change devices"
                )
            look = self._devices.look(gpu.uuid)
            layout = layout_with(
                look.gpu, self._devices.geometry(gpu.uuid), place, held=others, foreign=look.foreign
            )  # fmt: skip
            is_made = given.is_made or (place.profile is not None and standing_at(look.gpu, place) is None)
            entry = self._write(entry, number, replace(given, uuid="", is_made=is_made))
            result = self._devices.apply(layout)
            self._changed()
            uuid = uuid_at(self._gpu(place.gpu_index), place)
            if result.status is not ApplyStatus.APPLIED or not uuid:
                raise ClaimRefused(f"{given.device} could not be made ({result.rule or 'driver'}): {result.detail}")
        return self._write(entry, number, replace(entry.devices[number], uuid=uuid))

    def _write(self, entry: ReadyClaim, number: int, given: GivenDevice) -> ReadyClaim:
        devices = (*entry.devices[:number], given, *entry.devices[number + 1 :])
        entry = replace(entry, devices=devices)
        kept = self._journal.kept
        left = tuple(name for name in kept.left if name != given.device)
        if len(left) < len(kept.left):
            # It was ours before and still is.
            entry = replace(entry, devices=(*devices[:number], replace(given, is_made=True), *devices[number + 1 :]))
        self._journal.store(Kept(claims={**kept.claims, entry.uid: entry}, left=left))
        return entry

    # Unmaking

    def _is_gone(self, name: str, held: Collection[Place]) -> bool:
        """Whether a device that is left over is no more, or somebody's again."""
        try:
            gpu, place = self._placed(name)
        except ClaimRefused:
            return True
        if place in held or standing_at(gpu, place) is None:
            return place not in held
        if self._cannot_change:
            return False
        try:
            look = self._devices.look(gpu.uuid)
            layout = layout_without(look.gpu, self._devices.geometry(gpu.uuid), place, foreign=look.foreign)
        except (TransitionRefused, DeviceError, ClaimRefused, JournalError):
            return False
        result = self._devices.apply(layout)
        self._changed()
        if result.status is not ApplyStatus.APPLIED:
            _LOG.warning("event=device_left device=%s reason=%r", name, result.detail)
        return result.status is ApplyStatus.APPLIED

    # What is known

    def _held(self, kept: Kept) -> Iterator[tuple[ReadyClaim, Place]]:
        for entry in kept.claims.values():
            for one in entry.devices:
                try:
                    yield entry, self._placed(one.device)[1]
                except ClaimRefused:
                    # Its GPU is gone; nobody else can have it either.
                    continue

    def _lease(self, kept: Kept) -> None:
        self._is_leased = False
        uuids = [one.uuid for entry in kept.claims.values() for one in entry.devices if one.uuid]
        if not self._devices.lease(uuids):
            raise ClaimRefused("what claims hold could not be leased; see the agent's log for its driver and journal")
        self._is_leased = True
        if self._cdi is not None:
            self._cdi.name(uuids)

    def _placed(self, name: str) -> tuple[Gpu, Place]:
        index = gpu_index_of(name)
        gpu = None if index is None else self._gpu_or_none(index)
        if gpu is None:
            raise ClaimRefused(f"this node has no device {name}; its slices were published for other GPUs")
        place = place_of(name, geometry_of(gpu, self._catalogue))
        if place is None:
            raise ClaimRefused(f"GPU {gpu.index} ({gpu.product}) has no device {name}; allocate one of its slices")
        return gpu, place

    def _gpu(self, index: int) -> Gpu:
        gpu = self._gpu_or_none(index)
        if gpu is None:
            raise ClaimRefused(f"GPU {index} is gone")
        return gpu

    def _gpu_or_none(self, index: int) -> Gpu | None:
        return next((gpu for gpu in self._devices.gpus() if gpu.index == index), None)
