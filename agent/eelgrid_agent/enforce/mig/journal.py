"""The MIG journal: one record per device, its transition in progress, and the origin of each instance.

A transition has two phases that survive a crash:

    idle -> FORWARD -> idle                        reached
            FORWARD -> PENDING -> FORWARD          the mode came into force later
            FORWARD -> UNDO -> idle                undone
                       UNDO -> STUCK -> FORWARD    neither; retried a bounded number of times

Plans start from what exists, so a crash between steps repeats the phase. The generation of a span rises before an
instance is created on it, so a lease on an older generation is stale even though the driver reuses the UUID.

A record is stored before its change is visible, so a journal that cannot be written stops the step that needs it. The
file carries a checksum, and a damaged one is never guessed from.
"""

import json
import threading
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout, build_layout, read_layout, read_part
from eelgrid_agent.state_files import StateFileError, StateFormat, StateStore, require_text
from eelgrid_protos.messages import Gpu
from eelgrid_protos.values import dataclass

# Profile id and start of an instance.
InstancePlace = tuple[int, int]
# Start and size of what an instance lies on.
SliceSpan = tuple[int, int]


class TransitionPhase(StrEnum):
    """The phase of a transition."""

    FORWARD = "forward"
    PENDING = "pending"
    UNDO = "undo"
    STUCK = "stuck"


class InstanceOrigin(StrEnum):
    """Who created an instance."""

    MADE = "made"
    ADOPTED = "adopted"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigLease:
    """A right to a MIG device, or to a whole one with generation 0: the driver gives the UUID of an instance again."""

    uuid: str
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionIntent:
    """A transition under way."""

    phase: TransitionPhase
    before: MigLayout
    wanted: MigLayout
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigRecord:
    """One device; `target` is the layout last asked for and in force, None where nothing is enforced.

    `boot_id` is the boot that `known` is of; an empty one is no boot, which is what a reset leaves.
    """

    uuid: str
    boot_id: str = ""
    target: MigLayout | None = None
    intent: TransitionIntent | None = None
    known: Mapping[InstancePlace, InstanceOrigin] = field(default_factory=lambda: MappingProxyType({}))
    generations: Mapping[SliceSpan, int] = field(default_factory=lambda: MappingProxyType({}))
    leases: frozenset[MigLease] = frozenset()
    repairs: int = 0
    gave_up: bool = False

    def get_generation(self, start: int, size: int) -> int:
        """How often an instance was made on this span; 0 where none was ever seen."""
        return self.generations.get((start, size), 0)

    def foreign_instances(self, gpu: Gpu) -> frozenset[int]:
        """Ids of the instances that are not this agent's."""
        return frozenset(
            instance.id
            for instance in gpu.gpu_instances
            if self.known.get(read_part(instance).place, InstanceOrigin.FOREIGN) is InstanceOrigin.FOREIGN
        )

    def own_layout(self, gpu: Gpu) -> MigLayout:
        """The existing layout without foreign instances."""
        foreign = self.foreign_instances(gpu)
        parts = [read_part(instance) for instance in gpu.gpu_instances if instance.id not in foreign]
        return build_layout(gpu.mig_enabled, parts)

    def has_layout(self, gpu: Gpu, layout: MigLayout) -> bool:
        """Whether the layout is in force, ignoring foreign instances."""
        if gpu.mig_enabled != layout.mig_enabled or gpu.mig_pending:
            return False
        strangers = {
            read_part(instance) for instance in gpu.gpu_instances if instance.id in self.foreign_instances(gpu)
        }
        standing = set(read_layout(gpu).parts)
        return set(layout.parts) <= standing and standing - set(layout.parts) <= strangers

    def with_observation(self, gpu: Gpu, boot_id: str) -> "MigRecord":
        """Returns the record after the device was read.

        In a boot that the record does not know, all instances are new and the existing ones are adopted; later
        strangers are foreign. During a transition nothing is forgotten: a call that timed out may still take effect.
        """
        anew = self.boot_id != boot_id
        before: Mapping[InstancePlace, InstanceOrigin] = {} if anew else self.known
        standing = {read_part(instance).place: read_part(instance) for instance in gpu.gpu_instances}
        # While a mode waits for a reset no call is under way, and that may take days.
        under_way = self.intent is not None and self.intent.phase is not TransitionPhase.PENDING
        known = {place: origin for place, origin in before.items() if place in standing or under_way}
        generations = dict(self.generations)
        for place, part in standing.items():
            if place not in known:
                known[place] = InstanceOrigin.ADOPTED if anew else InstanceOrigin.FOREIGN
                _raise(generations, part.start, part.size)
        return _with(self, known, generations, boot_id)

    def with_adoption(self) -> "MigRecord":
        """Foreign instances are this agent's from now on."""
        known = {
            place: InstanceOrigin.ADOPTED if origin is InstanceOrigin.FOREIGN else origin
            for place, origin in self.known.items()
        }
        return _with(self, known)

    def with_new_instance(self, part: InstancePart) -> "MigRecord":
        """Returns the record before an instance is created: whatever existed in this place is gone."""
        return _with(self.with_new_compute(part), {**self.known, part.place: InstanceOrigin.MADE})

    def without_instance(self, part: InstancePart) -> "MigRecord":
        """Returns the record after the driver created no instance: whatever exists in this place is foreign."""
        return _with(self, {place: origin for place, origin in self.known.items() if place != part.place})

    def with_new_compute(self, part: InstancePart) -> "MigRecord":
        """Returns the record before a compute instance is created in an existing instance."""
        generations = dict(self.generations)
        _raise(generations, part.start, part.size)
        return _with(self, self.known, generations)

    def begin_transition(self, before: MigLayout, wanted: MigLayout) -> "MigRecord":
        """Returns the record with a new transition; one in progress passes on the layout from before it."""
        if self.intent is not None:
            before = self.intent.before
        return replace(self, intent=TransitionIntent(phase=TransitionPhase.FORWARD, before=before, wanted=wanted))

    def with_phase(self, phase: TransitionPhase) -> "MigRecord":
        """Returns the record with the transition in another phase; STUCK counts a try."""
        assert self.intent is not None, "no transition is under way"
        tries = self.intent.tries + (phase is TransitionPhase.STUCK)
        return replace(self, intent=replace(self.intent, phase=phase, tries=tries))

    def end_transition(self, gpu: Gpu, target: MigLayout | None) -> "MigRecord":
        """Returns the record without a transition; instances that do not exist are forgotten."""
        standing = {read_part(instance).place for instance in gpu.gpu_instances}
        known = {place: origin for place, origin in self.known.items() if place in standing}
        return _with(replace(self, intent=None, target=target), known)

    def find_orphans(self, gpu: Gpu) -> tuple[int, ...]:
        """Instances that this agent created and that hold no compute instance, unless that is requested."""
        goals = set() if self.target is None else {part.place for part in self.target.parts if not part.compute}
        return tuple(
            instance.id
            for instance in gpu.gpu_instances
            if not instance.compute_instances
            and self.known.get(read_part(instance).place) is InstanceOrigin.MADE
            and read_part(instance).place not in goals
        )

    def stamp_gpu(self, gpu: Gpu) -> Gpu:
        """The device with each compute instance's generation; 0 on an instance that came since the last look."""
        instances = []
        for instance in gpu.gpu_instances:
            known = read_part(instance).place in self.known
            generation = self.get_generation(instance.start, instance.size) if known else 0
            children = tuple(replace(child, generation=generation) for child in instance.compute_instances)
            instances.append(replace(instance, compute_instances=children))
        return replace(gpu, gpu_instances=tuple(instances))

    def with_leases(self, gpu: Gpu, uuids: Collection[str]) -> "MigRecord":
        """Returns the record with leases to those of these that exist, in place of all earlier leases."""
        leases = {
            MigLease(uuid=child.uuid, generation=self.get_generation(instance.start, instance.size))
            for instance in gpu.gpu_instances
            for child in instance.compute_instances
            if child.uuid in uuids
        }
        if gpu.uuid in uuids:
            leases.add(MigLease(uuid=gpu.uuid))
        return replace(self, leases=frozenset(leases))

    @property
    def is_leased_whole(self) -> bool:
        """Whether the whole device is leased."""
        return any(lease.uuid == self.uuid for lease in self.leases)

    def leased_instances(self, gpu: Gpu) -> frozenset[int]:
        """Ids of the instances that a lease holds; one on an older generation holds nothing."""
        return frozenset(
            instance.id
            for instance in gpu.gpu_instances
            for child in instance.compute_instances
            if self.is_leased_whole
            or MigLease(uuid=child.uuid, generation=self.get_generation(instance.start, instance.size)) in self.leases
        )


def _with(
    record: MigRecord,
    known: Mapping[InstancePlace, InstanceOrigin],
    generations: Mapping[SliceSpan, int] | None = None,
    boot_id: str | None = None,
) -> MigRecord:
    """The record with other maps, which nobody can change afterwards."""
    counts = record.generations if generations is None else generations
    boot_id = record.boot_id if boot_id is None else boot_id
    maps = MappingProxyType(dict(known)), MappingProxyType(dict(counts))
    return replace(record, known=maps[0], generations=maps[1], boot_id=boot_id)


def _raise(generations: dict[SliceSpan, int], start: int, size: int) -> None:
    generations[start, size] = generations.get((start, size), 0) + 1


# A node of 64 devices with every span ever used is under half of this.
_BYTES_MOST = 4 * 2**20


def _encode(records: Iterable[MigRecord]) -> dict[str, Any]:
    gpus = [_record_out(record) for record in records]
    return {"crc32": _checksum(gpus), "gpus": gpus}


def _decode(document: Mapping[str, Any]) -> tuple[MigRecord, ...]:
    # A bit that flipped on the disk must not decide which instance belongs to whom.
    if document.get("crc32") != _checksum(document.get("gpus")):
        raise ValueError("the checksum does not match")
    return tuple(_record_in(fields) for fields in document["gpus"])


def _record_out(record: MigRecord) -> dict[str, Any]:
    intent = record.intent
    return {
        "uuid": record.uuid,
        "boot_id": record.boot_id,
        "target": _layout_out(record.target),
        "intent": None
        if intent is None
        else {
            "phase": intent.phase.value,
            "before": _layout_out(intent.before),
            "wanted": _layout_out(intent.wanted),
            "tries": intent.tries,
        },
        "known": [[*place, origin.value] for place, origin in sorted(record.known.items())],
        "generations": [[*span, count] for span, count in sorted(record.generations.items())],
        "leases": sorted([lease.uuid, lease.generation] for lease in record.leases),
        "repairs": record.repairs,
        "gave_up": record.gave_up,
    }


def _checksum(gpus: object) -> int:
    return zlib.crc32(json.dumps(gpus, sort_keys=True).encode())


def _layout_out(layout: MigLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    parts = [[part.profile_id, part.start, part.size, list(part.compute)] for part in layout.parts]
    return {"mig_enabled": layout.mig_enabled, "parts": parts}


def _layout_in(fields: Mapping[str, Any]) -> MigLayout:
    parts = tuple(
        InstancePart(
            profile_id=_number(profile_id),
            start=_number(start),
            size=_number(size),
            compute=tuple(map(_number, compute)),
        )
        for profile_id, start, size, compute in fields["parts"]
    )
    return MigLayout(mig_enabled=_truth(fields["mig_enabled"]), parts=parts)


def _record_in(fields: Mapping[str, Any]) -> MigRecord:
    intent, target = fields["intent"], fields["target"]
    return MigRecord(
        uuid=require_text(fields["uuid"]),
        boot_id=require_text(fields["boot_id"]),
        target=None if target is None else _layout_in(target),
        intent=None
        if intent is None
        else TransitionIntent(
            phase=TransitionPhase(intent["phase"]),
            before=_layout_in(intent["before"]),
            wanted=_layout_in(intent["wanted"]),
            tries=_number(intent["tries"]),
        ),
        known={
            (_number(profile), _number(start)): InstanceOrigin(origin) for profile, start, origin in fields["known"]
        },
        generations={(_number(start), _number(size)): _number(n) for start, size, n in fields["generations"]},
        leases=frozenset(MigLease(uuid=require_text(uuid), generation=_number(n)) for uuid, n in fields["leases"]),
        repairs=_number(fields["repairs"]),
        gave_up=_truth(fields["gave_up"]),
    )


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not a boolean")
    return value


MigJournal = StateStore[tuple[MigRecord, ...]]

MIG_JOURNAL: StateFormat[tuple[MigRecord, ...]] = StateFormat(
    title="MIG journal",
    schema=1,
    encode=_encode,
    decode=_decode,
    empty=tuple,
    bytes_most=_BYTES_MOST,
    damage_remedy="put back a good one, or restart the agent to adopt the layouts that exist",
    write_consequence="nothing is changed before",
)


class MigRecordStore:
    """The records in memory, loaded once and stored on each change."""

    def __init__(self, journal: MigJournal) -> None:
        self._journal = journal
        self._records: dict[str, MigRecord] | None = None
        self._unread: StateFileError | None = None
        self._lock = threading.Lock()

    def get(self, uuid: str) -> MigRecord:
        """The record of a device; an empty one where none was ever kept. Raises StateFileError."""
        with self._lock:
            return self._load_records().get(uuid) or MigRecord(uuid=uuid)

    def put(self, record: MigRecord) -> MigRecord:
        """Stores a record and returns it; an unchanged record is not written. Raises StateFileError."""
        with self._lock:
            records = self._load_records()
            if records.get(record.uuid) != record:
                after = {**records, record.uuid: record}
                self._journal.store(tuple(after.values()))
                self._records = after
        return record

    def all(self) -> tuple[MigRecord, ...]:
        """Every record. Raises StateFileError."""
        with self._lock:
            return tuple(self._load_records().values())

    def _load_records(self) -> dict[str, MigRecord]:
        if self._unread is not None:
            raise self._unread
        if self._records is None:
            try:
                self._records = {record.uuid: record for record in self._journal.load()}
            except StateFileError as error:
                self._unread = error
                raise
        return self._records
