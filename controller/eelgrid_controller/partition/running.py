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

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from eelgrid_controller.partition.geometry import Layout, Tiling
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.plan import Gpu, Instance, Plan, Replica
from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import GpuLayout, WantedInstance

__all__ = ["RunningGpu", "Standing", "Target", "as_plan", "layout_of", "running", "targets"]


class Standing(NamedTuple):
    """An instance that stands; `pinned`: somebody else's, or in use by what this plan does not know."""

    profile: str  # its key in the catalogue
    start: int
    replica: Replica | None = None
    pinned: bool = False


class RunningGpu(NamedTuple):
    """One GPU; `held`: somebody else has it whole."""

    uuid: str
    node: str
    model: str
    mig_enabled: bool = False
    instances: tuple[Standing, ...] = ()
    whole: Replica | None = None
    held: bool = False

    def replicas(self) -> Iterator[Replica]:
        """What of ours runs on it."""
        yield from (instance.replica for instance in self.instances if instance.replica is not None)
        if self.whole is not None:
            yield self.whole

    @property
    def pinned(self) -> bool:
        """Whether something on it is not ours to touch."""
        return self.held or any(instance.pinned for instance in self.instances)


class Target(NamedTuple):
    """What one GPU could become: positions of instances that go, places that are made."""

    destroyed: tuple[int, ...]
    made: Layout  # a whole GPU is (WHOLE, 0)
    mode: bool = False  # whether MIG mode changes
    used: bool = True  # False: left as it stands, without replicas


def running(plan: Plan, uuids: Mapping[str, Iterable[tuple[str, str]]]) -> tuple[RunningGpu, ...]:
    """A plan on the GPUs of a fleet, (uuid, node) by model, in order; those beyond the plan stand empty."""
    left = {model: iter(tuple(members)) for model, members in uuids.items()}
    found = []
    for gpu in plan.gpus:
        uuid, node = next(left[gpu.model])
        standing = tuple(Standing(one.profile, one.start, one.replica) for one in gpu.instances)
        found.append(RunningGpu(uuid, node, gpu.model, bool(standing), standing, gpu.whole))
    for model, members in left.items():
        found += (RunningGpu(uuid, node, model) for uuid, node in members)
    return tuple(found)


def as_plan(gpus: Iterable[RunningGpu]) -> Plan:
    """What of ours runs, as a plan without proofs."""
    found = []
    for gpu in gpus:
        mine = tuple(Instance(one.profile, one.start, one.replica) for one in gpu.instances if one.replica is not None)
        if mine or gpu.whole is not None:
            found.append(Gpu(gpu.model, mine, gpu.whole))
    return Plan(tuple(found), ())


def layout_of(gpu: RunningGpu, geometry: MigGeometry) -> GpuLayout:
    """The message that asks an agent for what stands here, in the driver's names; pinned instances are in it."""
    wanted = tuple(
        WantedInstance(profile=geometry.profiles[one.profile].name, start=one.start) for one in gpu.instances
    )
    return GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=gpu.mig_enabled, instances=wanted)


def targets(gpu: RunningGpu, geometry: MigGeometry | None, plan: Tiling | None, *, whole: bool) -> tuple[Target, ...]:
    """Everything worthwhile that a GPU could become; the first two leave it as it is, without and with replicas."""
    found = [Target((), (), used=False), Target((), ())]
    if gpu.held:
        return tuple(found[:1])
    every = tuple(range(len(gpu.instances)))
    if whole and gpu.whole is None and not gpu.pinned:
        found.append(Target(every, ((WHOLE, 0),), mode=gpu.mig_enabled))
    if geometry is None or plan is None:
        return tuple(found)
    best: dict[tuple[tuple[int, ...], tuple[object, ...]], tuple[int, ...]] = {}
    by_counts: dict[tuple[int, ...], list[Target]] = {}
    for counts in plan.places:
        if not any(counts):
            continue
        for made in plan.places[counts]:
            destroyed = _under(gpu, geometry, made)
            if destroyed is None:
                continue
            # Two instances of a profile with like replicas are one to the plan.
            kind = tuple(sorted((gpu.instances[at].profile, repr(_alike(gpu.instances[at]))) for at in destroyed))
            if (counts, kind) not in best:
                best[counts, kind] = destroyed
                by_counts.setdefault(counts, []).append(Target(destroyed, made, mode=not gpu.mig_enabled))
    for members in by_counts.values():
        sets = [frozenset(target.destroyed) for target in members]
        found += (one for one, mine in zip(members, sets, strict=True) if not any(other < mine for other in sets))
    return tuple(found)


def _alike(standing: Standing) -> tuple[object, ...]:
    replica = standing.replica
    return () if replica is None else (replica.owner, replica.configuration)


def _under(gpu: RunningGpu, geometry: MigGeometry, made: Layout) -> tuple[int, ...] | None:
    """Positions of what stands under a layout; None if it cannot stand, or if a part of it stands already."""
    profiles = geometry.profiles
    parts = [(profiles[key], start) for key, start in made]
    destroyed = []
    for number, standing in enumerate(gpu.instances):
        if (standing.profile, standing.start) in made:
            return None
        if any(_overlap(profiles[standing.profile], standing.start, *part) for part in parts):
            if standing.pinned:
                return None
            destroyed.append(number)
    kept = [
        (profiles[one.profile], one.start) for number, one in enumerate(gpu.instances) if number not in destroyed
    ]  # those, too, take compute slices
    return None if geometry.conflict([*kept, *parts]) else tuple(destroyed)


def _overlap(one: GiProfile, one_start: int, other: GiProfile, other_start: int) -> bool:
    return one_start < other_start + other.size and other_start < one_start + one.size
