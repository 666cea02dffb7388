"""Device leases: the one place of a node where an engine gets a GPU or a MIG slice, kept over a crash.

Owns the table in force, its journal, and which GPUs have a MIG layout under way. Must not know how engines ask, nor how it
is found out that an owner has ended; what is refused and why is `lease_table`'s.

Theory. Every path that hands out a device takes its lease here first: the local engine before it starts a process, the
device plugin in Allocate, the DRA driver in Prepare, and others by the socket (node/lease_socket.py). A lease is on disk
before anybody is told, so a crash between the two leaves a lease too many and never one too few; the holder asks again and
gets the same answer, or its end is found out. A release is believed at once and written when that is possible: one that a
crash resurrects has a holder that has ended. Leases end with the boot of the machine, as processes do.

The leases of the local engine are not in the journal: the records of its attempts have them, and they are adopted before
anything is given.

A table is begun anew at the first start, after its file was lost, and with a boot, when the kubelet starts pods without
asking anybody. It is not complete until what stands was adopted from jobs, pods and claims, and nothing is given before.

A change of a MIG layout is no holder, since it takes seconds and survives nothing: while it runs, no device of that GPU is
given to anybody new, and what was given before is not touched by it. Either the lease came first, then the change finds it,
or the mark did, then the lease is refused.

Thread-safe: layouts and claims run on the driver's thread, everything else on the event loop.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from eelgrid_agent.enforce.lease_table import (
    KUBERNETES_ENGINE,
    LOCAL_ENGINE,
    NAME_MOST,
    LeaseDevice,
    LeaseEntry,
    LeaseHolder,
    LeaseRefused,
    LeaseTable,
    find_lease_device,
)
from eelgrid_agent.state_files import StateDamaged, StateFileError, StateStore
from eelgrid_protos import messages
from eelgrid_protos.messages import Gpu
from eelgrid_protos.safe_text import escape_text

_LOG = logging.getLogger("eelgrid.agent")
LEASES_FILE = "leases.json"
# A device plugin's Allocate does not say for whom it is, and the kubelet divides its devices by itself.
KUBELET_HOLDER = LeaseHolder(KUBERNETES_ENGINE, "device-plugin")
# Engines that are counted apart; more are counted together.
_ENGINES_COUNTED_MOST = 16
_DISPUTES_MOST = 64


class LayoutChanging(LeaseRefused):
    """The MIG layout of the GPU is being changed."""


class LeaseUnrecorded(LeaseRefused):
    """The journal cannot be written."""

    passes = False


class LeasesIncomplete(LeaseRefused):
    """What was in use before the table was begun is not in it yet."""


class UnknownDevice(LeaseRefused):
    """The node has no such device."""

    passes = False


class DeviceLeases:
    """The leases of one node. `boot_id` is of the machine, `wall_ns` of its clock."""

    def __init__(self, store: StateStore[LeaseTable], *, boot_id: str, wall_ns: Callable[[], int]) -> None:
        """Loads the journal; a damaged one is set aside and leaves `problem`. Raises StateFileError otherwise."""
        self._store, self._boot_id, self._wall_ns = store, boot_id or "unknown", wall_ns
        self._lock = threading.RLock()
        self._changing: Counter[str] = Counter()
        # What the journal says; None after a write that failed.
        self._recorded: LeaseTable | None = None
        self._engines = {LOCAL_ENGINE, KUBERNETES_ENGINE}
        # Whoever knows the inventory, and whoever reports leases, put themselves here.
        self.list_gpus: Callable[[], Iterable[Gpu]] = tuple
        self.on_change: Callable[[], None] = _ignore_change
        self.problem = ""
        self.refused_total: Counter[str] = Counter()
        self.reclaimed_total = 0
        self._unverified: Mapping[int, str] = {}
        # By holder and device: what an engine uses although another one has its lease.
        self.disputes: dict[tuple[LeaseHolder, LeaseDevice], str] = {}
        try:
            table = store.load()
        except StateDamaged as damaged:
            self.problem, table = str(damaged), LeaseTable()
            _LOG.warning("event=leases_unknown reason=%r", self.problem)
        self._recorded = table
        before = [lease.serial for lease in table.leases if lease.boot_id != self._boot_id]
        self._table = table.reclaim(before)

    def list_external(self) -> Mapping[str, tuple[messages.DeviceLease, ...]]:
        """Returns by GPU what other engines than the local one hold, whose work the controller knows, in order of time."""
        found: dict[str, list[messages.DeviceLease]] = {}
        for lease in sorted(self._table.leases, key=lambda one: (one.since_ns, one.serial)):
            held = found.setdefault(lease.device.gpu_uuid, [])
            if lease.holder.engine != LOCAL_ENGINE and len(held) < messages.LEASES_PER_GPU_MOST:
                owner = f"{lease.holder.owner} ({lease.note})" if lease.note else lease.holder.owner
                held.append(
                    messages.DeviceLease(
                        device_uuid=lease.device.uuid,
                        engine=lease.holder.engine,
                        owner=owner[:NAME_MOST],
                        since_ns=lease.since_ns,
                        unknown=self._unverified.get(lease.serial, ""),
                    )
                )
        return {uuid: tuple(held) for uuid, held in found.items()}

    def name_counted_engine(self, engine: str) -> str:
        """Returns the name under which an engine is counted: its own, if not too many have one."""
        if engine not in self._engines and len(self._engines) < _ENGINES_COUNTED_MOST:
            self._engines.add(engine)
        return engine if engine in self._engines else "other"

    @property
    def unverified(self) -> Mapping[int, str]:
        """By serial: leases whose owners' state is not known, and why."""
        return self._unverified

    def mark_unverified(self, reasons: Mapping[int, str]) -> None:
        """Says of which leases it is not known, from now on, whether their owners still exist."""
        found = {serial: escape_text(reason)[:NAME_MOST] for serial, reason in reasons.items()}
        is_new, self._unverified = found != self._unverified, found
        if is_new:
            self.on_change()

    @property
    def table(self) -> LeaseTable:
        """The leases in force."""
        return self._table

    def take(
        self,
        holder: LeaseHolder,
        names: Sequence[str],
        *,
        is_shared: bool = False,
        process: tuple[int, int] = (0, 0),
        note: str = "",
    ) -> tuple[LeaseEntry, ...]:
        """Leases devices by UUID or GPU index, all or none, and returns the holder's leases. Raises LeaseRefused."""
        try:
            devices = _find_devices(names, tuple(self.list_gpus()))
        except UnknownDevice as refused:
            self._note_refusal(holder, refused)
            raise
        return self.take_devices(holder, devices, is_shared=is_shared, process=process, note=note)

    def take_devices(
        self,
        holder: LeaseHolder,
        devices: Sequence[LeaseDevice],
        *,
        is_shared: bool = False,
        process: tuple[int, int] = (0, 0),
        note: str = "",
    ) -> tuple[LeaseEntry, ...]:
        """Leases all of these devices or none; returns the holder's leases. Raises LeaseRefused."""
        with self._lock:
            try:
                self._refuse_early(holder, devices)
                table = self._table.take(
                    holder,
                    devices,
                    since_ns=max(0, self._wall_ns()),
                    boot_id=self._boot_id,
                    is_shared=is_shared,
                    process=process,
                    note=note[:NAME_MOST],
                )
                self._write(table)
            except LeaseRefused as refused:
                self._note_refusal(holder, refused)
                raise
            self._table = table
            found = tuple(lease for lease in table.leases if lease.holder == holder)
        self.on_change()
        return found

    def adopt(
        self,
        holder: LeaseHolder,
        devices: Sequence[LeaseDevice],
        *,
        is_shared: bool = False,
        note: str = "",
        since_ns: int = 0,
    ) -> bool:
        """Leases what an engine already uses, since now by default; False, and a dispute, where another one has the lease."""
        with self._lock:
            known = {(lease.holder, lease.device): lease for lease in self._table.leases}
            new = [device for device in devices if (holder, device) not in known]
            table, is_whole = self._table, True
            for device in new:
                try:
                    table = table.take(
                        holder,
                        (device,),
                        since_ns=since_ns or max(0, self._wall_ns()),
                        boot_id=self._boot_id,
                        is_shared=is_shared,
                        note=note[:NAME_MOST],
                    )
                except LeaseRefused as refused:
                    is_whole = False
                    self._dispute(holder, device, refused)
            for device in devices:
                lease = known.get((holder, device))
                if lease is not None and note and lease.note != note[:NAME_MOST]:
                    table = table.with_note(lease.serial, note[:NAME_MOST])
            if not self._replace(table):
                return is_whole
        self.on_change()
        return is_whole

    def release(self, holder: LeaseHolder, names: Sequence[str] | None = None) -> int:
        """Ends the leases of a holder, by default all; returns how many. Nothing to end is no error."""
        devices = None
        if names is not None:
            gpus = tuple(self.list_gpus())
            devices = [device for name in names if (device := find_lease_device(name, gpus)) is not None]
        return self._end(lambda table: table.release(holder, devices))

    def keep_only(self, engine: str, owners: Collection[str]) -> int:
        """Ends the leases of all other owners of an engine, which knows its own; returns how many."""
        return self._end(
            lambda table: table.reclaim(
                lease.serial for lease in table.of_engine(engine) if lease.holder.owner not in owners
            )
        )

    def reclaim(self, serials: Collection[int]) -> int:
        """Ends leases whose owners are gone; one that was taken again meanwhile stays. Returns how many."""
        count = self._end(lambda table: table.reclaim(serials))
        self.reclaimed_total += count
        return count

    def find_conflict(self, holder: LeaseHolder, name: str) -> LeaseEntry | None:
        """Returns the lease that keeps a holder from a device of this node; None if nothing does."""
        device = find_lease_device(name, self.list_gpus())
        return None if device is None else self._table.find_conflict(device, holder)

    @contextmanager
    def change_layout(self, gpu_uuid: str) -> Iterator[None]:
        """While the block runs nothing of the GPU is given to anybody; blocks of one GPU may be nested."""
        with self._lock:
            self._changing[gpu_uuid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._changing[gpu_uuid] -= 1

    def list_protected(self, gpu_uuid: str) -> frozenset[str]:
        """Returns the UUIDs of the GPU or of its slices that a change of its layout must not touch."""
        return self._table.list_protected(gpu_uuid)

    def describe_holders(self, gpu_uuid: str) -> str:
        """Names who holds something of a GPU; empty if nobody does."""
        found = (lease.describe_holder() for lease in self._table.leases if lease.device.gpu_uuid == gpu_uuid)
        return ", ".join(dict.fromkeys(found))

    @property
    def is_complete(self) -> bool:
        """Whether everything that was in use before is known."""
        return self._table.adopted_boot == self._boot_id

    def finish_adoption(self) -> None:
        """Everything that stands was adopted: from now on devices are given."""
        with self._lock:
            self._replace(replace(self._table, adopted_boot=self._boot_id))

    def _refuse_early(self, holder: LeaseHolder, devices: Iterable[LeaseDevice]) -> None:
        if not self.is_complete:
            raise LeasesIncomplete(
                "the agent still finds out what was in use before it started; ask again in a few seconds"
            )
        for device in devices:
            if self._changing[device.gpu_uuid] > 0 and not any(
                lease.holder == holder and lease.device == device for lease in self._table.leases
            ):
                raise LayoutChanging(
                    f"the MIG layout of GPU {device.gpu_uuid} is being changed; ask again in a few seconds"
                )

    def _note_refusal(self, holder: LeaseHolder, refused: LeaseRefused) -> None:
        _LOG.info("event=lease_refused engine=%s owner=%s reason=%r", *holder, str(refused))
        self.refused_total[self.name_counted_engine(holder.engine)] += 1

    def _dispute(self, holder: LeaseHolder, device: LeaseDevice, refused: LeaseRefused) -> None:
        if (holder, device) not in self.disputes and len(self.disputes) < _DISPUTES_MOST:
            _LOG.warning("event=lease_disputed engine=%s owner=%s reason=%r", *holder, str(refused))
            self.disputes[holder, device] = str(refused)

    def tidy(self) -> None:
        """Forgets the disputes, which those who adopt raise again if they stand, and writes what was not written."""
        with self._lock:
            self.disputes.clear()
            self._replace(self._table)

    def _end(self, change: Callable[[LeaseTable], LeaseTable]) -> int:
        with self._lock:
            count = len(self._table.leases)
            is_changed = self._replace(change(self._table))
            count -= len(self._table.leases)
        if is_changed:
            self.on_change()
        return count

    def _replace(self, table: LeaseTable) -> bool:
        """Puts a table in force that nobody waits for; one that cannot be written now is written with the next."""
        is_other, self._table = table is not self._table, table
        try:
            self._write(table)
        except LeaseUnrecorded as error:
            _LOG.warning("event=leases_unwritten reason=%r", str(error))
        return is_other

    def _write(self, table: LeaseTable) -> None:
        """Writes what is other than the journal says; raises LeaseUnrecorded."""
        kept = table.without_engine(LOCAL_ENGINE)
        if self._recorded is not None and kept.says_same(self._recorded):
            return
        try:
            self._recorded = None
            self._store.store(kept)
            self._recorded = kept
        except StateFileError as error:
            raise LeaseUnrecorded(f"the lease cannot be recorded: {error}") from error


def _find_devices(names: Iterable[str], gpus: Sequence[Gpu]) -> list[LeaseDevice]:
    """Returns the devices of a node by UUID or GPU index; raises UnknownDevice."""
    found = []
    for name in names:
        device = find_lease_device(name, gpus)
        if device is None:
            raise UnknownDevice(f"this node has no GPU or slice {name}; `eelgrid-agent mig show` lists them")
        found.append(device)
    return found


def _ignore_change() -> None:
    """Nobody reports leases."""
