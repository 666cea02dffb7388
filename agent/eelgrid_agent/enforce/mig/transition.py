"""The journaled MIG record of one device: request, transition in progress, and origin of each instance.

A transition has two phases that survive a crash:

    idle -> FORWARD -> idle                        reached
            FORWARD -> PENDING -> FORWARD          mode in force at last
            FORWARD -> UNDO -> idle                undone
                       UNDO -> STUCK -> FORWARD    neither; retried, boundedly

Plans start from what exists, so a crash between steps repeats the phase. The generation of a span rises before an
instance is created on it, so a lease on an older generation is stale even though the driver reuses the UUID.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout, build_layout, read_layout, read_part
from eelgrid_protos.messages import Gpu

# Profile id and start of an instance.
InstancePlace = tuple[int, int]
# Start and size of what an instance lies on.
SliceSpan = tuple[int, int]


class TransitionPhase(StrEnum):
    """Where a transition stands."""

    FORWARD = "forward"
    PENDING = "pending"
    UNDO = "undo"
    STUCK = "stuck"


class InstanceOrigin(StrEnum):
    """Whose an instance is."""

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
        """What stands, less what is not this agent's."""
        foreign = self.foreign_instances(gpu)
        parts = [read_part(instance) for instance in gpu.gpu_instances if instance.id not in foreign]
        return build_layout(gpu.mig_enabled, parts)

    def has_layout(self, gpu: Gpu, layout: MigLayout) -> bool:
        """Whether the layout is in force, whatever foreign instances stand beside it."""
        if gpu.mig_enabled != layout.mig_enabled or gpu.mig_pending:
            return False
        strangers = {
            read_part(instance) for instance in gpu.gpu_instances if instance.id in self.foreign_instances(gpu)
        }
        standing = set(read_layout(gpu).parts)
        return set(layout.parts) <= standing and standing - set(layout.parts) <= strangers

    def with_observation(self, gpu: Gpu, boot_id: str) -> "MigRecord":
        """The record after a look at the device.

        In a boot that the record does not know, everything was made anew and what stands is adopted; later strangers
        are foreign. While a transition is under way nothing is forgotten: a call that timed out may still take effect.
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
        """An instance is about to be made, so whatever stood in this place is gone."""
        return _with(self.with_new_compute(part), {**self.known, part.place: InstanceOrigin.MADE})

    def without_instance(self, part: InstancePart) -> "MigRecord":
        """The driver made no instance there, so whatever stands in this place is somebody else's."""
        return _with(self, {place: origin for place, origin in self.known.items() if place != part.place})

    def with_new_compute(self, part: InstancePart) -> "MigRecord":
        """A compute instance is about to be made in an instance that stands."""
        generations = dict(self.generations)
        _raise(generations, part.start, part.size)
        return _with(self, self.known, generations)

    def begin_transition(self, before: MigLayout, wanted: MigLayout) -> "MigRecord":
        """A transition begins; one that is still under way lends what stood before it."""
        if self.intent is not None:
            before = self.intent.before
        return replace(self, intent=TransitionIntent(phase=TransitionPhase.FORWARD, before=before, wanted=wanted))

    def with_phase(self, phase: TransitionPhase) -> "MigRecord":
        """The transition goes on in another phase; STUCK counts a try."""
        assert self.intent is not None, "no transition is under way"
        tries = self.intent.tries + (phase is TransitionPhase.STUCK)
        return replace(self, intent=replace(self.intent, phase=phase, tries=tries))

    def end_transition(self, gpu: Gpu, target: MigLayout | None) -> "MigRecord":
        """No transition is under way any more; what does not stand is forgotten."""
        standing = {read_part(instance).place for instance in gpu.gpu_instances}
        known = {place: origin for place, origin in self.known.items() if place in standing}
        return _with(replace(self, intent=None, target=target), known)

    def find_orphans(self, gpu: Gpu) -> tuple[int, ...]:
        """Instances that this agent made and that hold no compute instance, unless that is what is wanted."""
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
        """Rights to what of these stands now, in place of all that were there before."""
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
        """Whether somebody has a right to the device as it is."""
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
