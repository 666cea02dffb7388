"""GPUs as they run: what stands on each, whose it is, and what each could become.

Owns the values of a running fleet and the targets of one GPU. Must not know which
target is chosen, nor why.

Theory: a target keeps some of what stands and makes new instances in the room that
is left. Only what overlaps a new instance goes, and an instance is never made
where one of its kind stands: the place is used again instead. So a target is a
legal layout of new instances, and what it costs is what lies under it. Of two
targets with the same new instances, the one that destroys more is never better.
Instances that are not ours to touch are in every target.
"""

from collections.abc import Iterator
from typing import NamedTuple

from eelgrid_controller.partition.geometry import Layout, Multiset, Tiling, memory_slice_mask
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.plan import PartitionReplica
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import GpuLayout, WantedInstance


class RunningInstance(NamedTuple):
    """An instance that stands; `pinned`: somebody else's, or in use by what this plan does not know."""

    profile: str  # its key in the catalogue
    start: int
    replica: PartitionReplica | None = None
    pinned: bool = False
    compute_slices: tuple[int, ...] = ()  # of its compute instances; none for one over all of it


class RunningGpu(NamedTuple):
    """One GPU; `held`: somebody else has it whole."""

    uuid: str
    node: str
    model: str
    mig_enabled: bool = False
    instances: tuple[RunningInstance, ...] = ()
    whole: PartitionReplica | None = None
    held: bool = False

    def replicas(self) -> Iterator[PartitionReplica]:
        """What of ours runs on it."""
        yield from (instance.replica for instance in self.instances if instance.replica is not None)
        if self.whole is not None:
            yield self.whole

    @property
    def pinned(self) -> bool:
        """Whether something on it is not ours to touch."""
        return self.held or True in [instance.pinned for instance in self.instances]


class GpuTarget(NamedTuple):
    """What one GPU could become: positions of instances that go, places that are made."""

    destroyed: tuple[int, ...]
    made: Layout  # a whole GPU is (WHOLE, 0)
    mode: bool = False  # whether MIG mode changes
    used: bool = True  # False: left as it stands, without replicas


def layout_message(gpu: RunningGpu, geometry: MigGeometry) -> GpuLayout:
    """The message that asks an agent for what stands here, in the driver's names; pinned instances are in it."""
    wanted = tuple(
        WantedInstance(profile=geometry.profiles[one.profile].name, start=one.start, compute_slices=one.compute_slices)
        for one in gpu.instances
    )
    return GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=gpu.mig_enabled, instances=wanted)


def enumerate_targets(
    gpu: RunningGpu, geometry: MigGeometry | None, plan: Tiling | None, *, whole: bool
) -> tuple[GpuTarget, ...]:
    """Everything worthwhile that a GPU could become; the first two leave it as it is, without and with replicas."""
    found = [GpuTarget((), (), used=False), GpuTarget((), ())]
    if gpu.held:
        return tuple(found[:1])
    if whole and gpu.whole is None and not gpu.pinned:
        found.append(GpuTarget(tuple(range(len(gpu.instances))), ((WHOLE, 0),), mode=gpu.mig_enabled))
    if geometry is None or plan is None:
        return tuple(found)
    spans = [memory_slice_mask(geometry, one.profile, one.start) for one in gpu.instances]
    fixed = sum(mask for mask, one in zip(spans, gpu.instances, strict=True) if one.pinned)
    standing = {(one.profile, one.start) for one in gpu.instances}
    # Two instances of a profile with like replicas are one to the plan.
    alike = [(one.profile, _alike(one)) for one in gpu.instances]
    by_counts: dict[Multiset, dict[tuple[object, ...], GpuTarget | None]] = {}
    for counts, layouts in plan.places.items():
        here = by_counts.setdefault(counts, {})
        for made in layouts:
            mask = plan.slices[made]
            if not made or mask & fixed or any(part in standing for part in made):
                continue
            destroyed = tuple(number for number, other in enumerate(spans) if mask & other)
            kind = tuple(sorted(alike[number] for number in destroyed))
            if kind not in here:
                stands = _stands(gpu, geometry, made, destroyed)
                here[kind] = GpuTarget(destroyed, made, mode=not gpu.mig_enabled) if stands else None
    for kinds in by_counts.values():
        members = [target for target in kinds.values() if target is not None]
        sets = [frozenset(target.destroyed) for target in members]
        found += (one for one, mine in zip(members, sets, strict=True) if not any(other < mine for other in sets))
    return tuple(found)


def _alike(standing: RunningInstance) -> str:
    replica = standing.replica
    return "" if replica is None else f"{replica.owner} {replica.configuration!r}"


def _stands(gpu: RunningGpu, geometry: MigGeometry, made: Layout, destroyed: tuple[int, ...]) -> bool:
    """Whether a layout can stand beside what stays, which takes compute slices, too."""
    kept = [(one.profile, one.start) for number, one in enumerate(gpu.instances) if number not in destroyed]
    return geometry.conflict([(geometry.profiles[key], start) for key, start in (*kept, *made)]) is None
