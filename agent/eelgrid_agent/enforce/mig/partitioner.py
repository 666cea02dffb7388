"""Steps from an existing to a requested MIG layout: the fewest, or the rule that forbids them.

An instance in its place costs nothing; every other costs its destruction, every missing one its creation. No step
helps two instances, so the sum is the minimum. Destroying before creating needs no room that is not free yet. Mode
changes need an empty device. Compute instances are compared as counts of profiles; `remake` names the instances
to recreate.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout, order_compute_instances, read_part
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMigMode:
    """Asks for MIG mode."""

    enabled: bool

    def describe(self) -> str:
        """The step for a person."""
        return f"turn MIG mode {'on' if self.enabled else 'off'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyComputeInstance:
    """Removes one compute instance."""

    instance_id: int
    compute_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"destroy compute instance {self.compute_id} of GPU instance {self.instance_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyGpuInstance:
    """Removes one GPU instance, which has no compute instance by then."""

    instance_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"destroy GPU instance {self.instance_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGpuInstance:
    """Makes a GPU instance at exactly this place."""

    profile_id: int
    start: int

    def describe(self) -> str:
        """The step for a person."""
        return f"create GPU instance of profile {self.profile_id} at {self.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateComputeInstance:
    """Creates a compute instance in the GPU instance that starts at `start`; the driver chooses its id."""

    start: int
    profile_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"create compute instance of profile {self.profile_id} in the GPU instance at {self.start}"


MigStep = SetMigMode | DestroyComputeInstance | DestroyGpuInstance | CreateGpuInstance | CreateComputeInstance


class TransitionRefused(Exception):
    """A rule forbids the layout now."""

    def __init__(self, rule: RefusalRule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


def plan_steps(
    geometry: MigGeometry,
    gpu: Gpu,
    wanted: MigLayout,
    *,
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
    clients: bool = False,
    mode_changes: bool = True,
    remake: Collection[int] = frozenset(),
) -> tuple[MigStep, ...]:
    """Returns the fewest steps from the existing to the requested layout; raises TransitionRefused.

    `busy` and `foreign` are ids of GPU instances that must not be touched; a foreign one that leaves room stays beside
    the requested ones. `clients` says that a process or a lease holds the whole device, `mode_changes` that the
    platform allows the mode to change.
    """
    if gpu.lost:
        raise TransitionRefused(RefusalRule.LOST, "the GPU answers nothing; bring it back first")
    to_mode = _mode_step(gpu, wanted, clients=clients, mode_changes=mode_changes)
    by_place = {part.place: part for part in wanted.parts}
    surplus: list[GpuInstance] = []
    kept: dict[tuple[int, int], GpuInstance] = {}
    beside: list[InstancePart] = []
    for instance in gpu.gpu_instances:
        standing = read_part(instance)
        goal = by_place.get(standing.place)
        if goal is not None:
            kept[goal.place] = instance
        if goal != standing and instance.id in foreign:
            if goal is not None:
                raise TransitionRefused(
                    RefusalRule.FOREIGN, f"{_describe_instance(instance)} is not this agent's to change"
                )
            beside.append(standing)
        elif goal != standing and instance.id in busy:
            raise TransitionRefused(
                RefusalRule.BUSY,
                f"{_describe_instance(instance)} is in use and differs from the request; drain it first",
            )
        elif goal is None:
            surplus.append(instance)
    _check_room(geometry, wanted, beside, to_mode)
    steps: list[MigStep] = []
    # A pending mode is taken back before anything else is done.
    if to_mode is not None and to_mode.enabled == gpu.mig_enabled:
        steps.append(to_mode)
        to_mode = None
    steps += _destructions(surplus, kept, by_place, remake)
    if to_mode is not None:
        steps.append(to_mode)
    steps += _creations(geometry, wanted, kept, remake)
    return tuple(steps)


def find_conflict(geometry: MigGeometry, parts: Iterable[InstancePart]) -> str | None:
    """Returns why these cannot exist together, or None; of profiles that the geometry lacks only the span is known."""
    everything = tuple(parts)
    known: list[tuple[GiProfile, int]] = []
    for number, part in enumerate(everything):
        profile = geometry.profile_by_id(part.profile_id)
        if profile is not None:
            known.append((profile, part.start))
        for other in everything[:number]:
            if part.overlaps(other):
                return f"profile {part.profile_id} at {part.start} overlaps profile {other.profile_id} at {other.start}"
    return geometry.conflict(known)


def _mode_step(gpu: Gpu, wanted: MigLayout, *, clients: bool, mode_changes: bool) -> SetMigMode | None:
    changes = wanted.mig_enabled != gpu.mig_enabled
    if not changes and not gpu.mig_pending:
        return None
    mode = "on" if wanted.mig_enabled else "off"
    if not gpu.mig_capable:
        raise TransitionRefused(RefusalRule.MODE, f"{gpu.product} has no MIG; request none")
    if changes and gpu.mig_pending:
        detail = f"MIG mode {mode} waits for a reset of the GPU or a reboot; no instance is created before"
        raise TransitionRefused(RefusalRule.PENDING, detail)
    if not mode_changes:
        detail = f"this platform cannot reset the GPU, so MIG mode stays; turn it {mode} from outside the machine"
        raise TransitionRefused(RefusalRule.MODE, detail)
    if gpu.mig_pending and gpu.gpu_instances:
        detail = "another MIG mode waits for a reset and instances exist; reset the GPU or remove them"
        raise TransitionRefused(RefusalRule.PENDING, detail)
    if clients:
        raise TransitionRefused(
            RefusalRule.BUSY, f"the GPU is in use; stop what uses it before MIG mode is turned {mode}"
        )
    return SetMigMode(enabled=wanted.mig_enabled)


def _check_room(
    geometry: MigGeometry, wanted: MigLayout, beside: list[InstancePart], to_mode: SetMigMode | None
) -> None:
    problem = find_conflict(geometry, wanted.parts)
    if wanted.parts and not wanted.mig_enabled:
        problem = "instances are requested with MIG off"
    if problem:
        raise TransitionRefused(RefusalRule.GEOMETRY, f"{problem}; correct the layout")
    if beside and to_mode is not None:
        detail = "an instance that this agent did not create exists; remove it before MIG mode changes"
        raise TransitionRefused(RefusalRule.FOREIGN, detail)
    problem = find_conflict(geometry, [*wanted.parts, *beside]) if beside else None
    if problem:
        detail = f"{problem}, of which one is not this agent's to remove; remove it, or plan around it"
        raise TransitionRefused(RefusalRule.FOREIGN, detail)


def _destructions(
    surplus: list[GpuInstance],
    kept: dict[tuple[int, int], GpuInstance],
    by_place: dict[tuple[int, int], InstancePart],
    remake: Collection[int],
) -> Iterator[MigStep]:
    changed = [(instance, by_place[place]) for place, instance in kept.items()]
    everything: list[tuple[GpuInstance, InstancePart | None]] = [*((instance, None) for instance in surplus), *changed]
    for instance, goal in sorted(everything, key=lambda pair: (-pair[0].size, pair[0].start)):
        room = Counter(() if goal is None else goal.compute)
        if instance.id in remake and read_part(instance) != goal:
            room.clear()
        doomed = []
        for child in sorted(instance.compute_instances, key=lambda child: child.id):
            if room[child.profile_id]:
                room[child.profile_id] -= 1
            else:
                doomed.append(child.id)
        for compute_id in reversed(doomed):
            yield DestroyComputeInstance(instance_id=instance.id, compute_id=compute_id)
        if goal is None:
            yield DestroyGpuInstance(instance_id=instance.id)


def _creations(
    geometry: MigGeometry, wanted: MigLayout, kept: dict[tuple[int, int], GpuInstance], remake: Collection[int]
) -> Iterator[MigStep]:
    for part in sorted(wanted.parts, key=lambda part: _by_size(geometry, part)):
        instance = kept.get(part.place)
        if instance is None and geometry.profile_by_id(part.profile_id) is None:
            detail = f"{geometry.key} has no profile {part.profile_id}; correct the layout"
            raise TransitionRefused(RefusalRule.GEOMETRY, detail)
        if instance is None:
            yield CreateGpuInstance(profile_id=part.profile_id, start=part.start)
        standing = Counter(() if instance is None else read_part(instance).compute)
        again = instance is not None and instance.id in remake and read_part(instance) != part
        if again:
            standing.clear()
        # Where one order failed, the other is tried: drivers differ in where they put a compute instance.
        order = part.compute if again or standing.total() else order_compute_instances(geometry, part)
        for profile_id in order:
            if standing[profile_id]:
                standing[profile_id] -= 1
            else:
                yield CreateComputeInstance(start=part.start, profile_id=profile_id)


def _by_size(geometry: MigGeometry, part: InstancePart) -> tuple[int, int, int]:
    """Largest first: sort key."""
    profile = geometry.profile_by_id(part.profile_id)
    return -part.size, -(profile.compute_slices if profile else 0), part.start


def _describe_instance(instance: GpuInstance) -> str:
    return f"GPU instance {instance.id} ({instance.profile} at {instance.start})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStep:
    """One step."""

    step: str
    why: str


def describe_steps(
    steps: Iterable[MigStep], gpu: Gpu, wanted: MigLayout, geometry: MigGeometry
) -> tuple[DescribedStep, ...]:
    """Describes the steps on a device in the state of `gpu`, and why each is taken."""
    steps = tuple(steps)
    doomed = {step.instance_id for step in steps if isinstance(step, DestroyGpuInstance)}
    return tuple(_reasons_spell(step, gpu, doomed, wanted, geometry) for step in steps)


def _reasons_spell(
    step: MigStep, gpu: Gpu, doomed: set[int], wanted: MigLayout, geometry: MigGeometry
) -> DescribedStep:
    standing = {instance.id: instance for instance in gpu.gpu_instances}
    match step:
        case SetMigMode(enabled=enabled) if enabled == gpu.mig_enabled:
            other = "off" if enabled else "on"
            return DescribedStep(step=step.describe(), why=f"MIG mode {other} is pending and not requested")
        case SetMigMode(enabled=enabled):
            return DescribedStep(
                step=step.describe(),
                why=f"it is {'off' if enabled else 'on'} and requested {'on' if enabled else 'off'}",
            )
        case DestroyComputeInstance(instance_id=number, compute_id=child):
            why = "its GPU instance is removed" if number in doomed else "this share is not requested"
            return DescribedStep(
                step=f"destroy compute instance {child} of {_describe_instance(standing[number])}", why=why
            )
        case DestroyGpuInstance(instance_id=number):
            return DescribedStep(
                step=f"destroy {_describe_instance(standing[number])}", why="it exists and is not requested"
            )
        case CreateGpuInstance(profile_id=profile_id, start=start):
            profile = geometry.profile_by_id(profile_id)
            name = profile.name if profile else f"profile {profile_id}"
            return DescribedStep(step=f"create {name} at {start}", why="it is requested and does not exist")
        case CreateComputeInstance(start=start, profile_id=profile_id):
            part = wanted.part_at(start)
            profile = geometry.profile_by_id(part.profile_id) if part else None
            return DescribedStep(
                step=f"create {_compute_instance_name(profile, profile_id)} at {start}",
                why="work runs in compute instances",
            )


def _compute_instance_name(profile: GiProfile | None, profile_id: int) -> str:
    """A compute instance by its slices, such as 1c.3g.20gb; the whole goes by no share."""
    share = next((ci for ci in profile.compute_instances if ci.id == profile_id), None) if profile else None
    if profile is None or share is None:
        return f"compute instance of profile {profile_id}"
    if share.compute_slices == profile.compute_slices:
        return f"compute instance over all of {profile.name}"
    return f"compute instance {share.compute_slices}c.{profile.name}"


def format_layout(layout: MigLayout, geometry: MigGeometry) -> str:
    """A layout in the words of --layout: 3g.20gb@4,2g.10gb@0."""
    if not layout.mig_enabled:
        return "off"
    texts = []
    for part in layout.parts:
        profile = geometry.profile_by_id(part.profile_id)
        name = profile.name if profile else f"profile {part.profile_id}"
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances} if profile else {}
        sizes = [slices.get(child) for child in part.compute] or [None]
        for size in sizes:
            whole = profile is None or size in (None, profile.compute_slices)
            texts.append(f"{'' if whole else f'{size}c.'}{name}@{part.start}")
    return ",".join(texts) or "empty"
