"""The way from the layout found to the layout wanted, in the fewest steps, or the rule that forbids it.

Pure: owns which step comes when and what may not be touched. Must not know the
device port, time, or who made an instance: busy and foreign are told.

Theory. An instance that stands where it is wanted, by profile and start, costs
nothing; every other one costs its own destruction and that of its compute
instances, every missing one its creation and theirs. Nothing else ever helps,
since a step changes one instance and no instance can stand in for another; so
the sum is the minimum, and destroying everything before creating anything
reaches it without ever asking the driver for room that is not there yet. Mode
changes need an empty device: after the last destruction or before the first
creation. Compute instances are compared as counts of profiles, because the
port does not say where within a GPU instance they lie; `remake` names the
instances whose compute instances are better made anew because of that.

TransitionRefused    the layout may not be had now; names the rule
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from eelgrid_agent.mig.layout import Layout, Part, creation_order, part_of
from eelgrid_agent.mig.steps import CreateCompute, CreateInstance, DestroyCompute, DestroyInstance, SetMode, Step
from eelgrid_agent.refusal import Rule
from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance

__all__ = ["TransitionRefused", "conflict", "plan_steps"]


class TransitionRefused(Exception):
    """The layout may not be had now."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


def plan_steps(
    geometry: MigGeometry,
    gpu: Gpu,
    wanted: Layout,
    *,
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
    clients: bool = False,
    mode_changes: bool = True,
    remake: Collection[int] = frozenset(),
) -> tuple[Step, ...]:
    """The fewest steps from what stands to the wanted layout; raises TransitionRefused.

    `busy` and `foreign` are ids of GPU instances that may not be touched; a foreign one that leaves room stays beside
    the wanted ones. `clients` says that a process or a lease holds the whole device, `mode_changes` that the platform lets the
    mode change.
    """
    if gpu.lost:
        raise TransitionRefused(Rule.LOST, "the GPU answers nothing; bring it back first")
    to_mode = _mode_step(gpu, wanted, clients=clients, mode_changes=mode_changes)
    by_place = {part.place: part for part in wanted.parts}
    surplus: list[GpuInstance] = []
    kept: dict[tuple[int, int], GpuInstance] = {}
    beside: list[Part] = []
    for instance in gpu.gpu_instances:
        standing = part_of(instance)
        goal = by_place.get(standing.place)
        if goal is not None:
            kept[goal.place] = instance
        if goal != standing and instance.id in foreign:
            if goal is not None:
                raise TransitionRefused(Rule.FOREIGN, f"{_spell(instance)} is not this agent's to change")
            beside.append(standing)
        elif goal != standing and instance.id in busy:
            raise TransitionRefused(Rule.BUSY, f"{_spell(instance)} is in use and not as it is wanted; drain it first")
        elif goal is None:
            surplus.append(instance)
    _check_room(geometry, wanted, beside, to_mode)
    steps: list[Step] = []
    # A pending mode is taken back before anything else is done.
    if to_mode is not None and to_mode.enabled == gpu.mig_enabled:
        steps.append(to_mode)
        to_mode = None
    steps += _destructions(surplus, kept, by_place, remake)
    if to_mode is not None:
        steps.append(to_mode)
    steps += _creations(geometry, wanted, kept, remake)
    return tuple(steps)


def conflict(geometry: MigGeometry, parts: Iterable[Part]) -> str | None:
    """Why these cannot stand together, or None; of profiles that the geometry lacks only the span is known."""
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


def _mode_step(gpu: Gpu, wanted: Layout, *, clients: bool, mode_changes: bool) -> SetMode | None:
    changes = wanted.mig_enabled != gpu.mig_enabled
    if not changes and not gpu.mig_pending:
        return None
    mode = "on" if wanted.mig_enabled else "off"
    if not gpu.mig_capable:
        raise TransitionRefused(Rule.MODE, f"{gpu.product} has no MIG; ask for none")
    if changes and gpu.mig_pending:
        detail = f"MIG mode {mode} waits for a reset of the GPU or a reboot; nothing is placed before"
        raise TransitionRefused(Rule.PENDING, detail)
    if not mode_changes:
        detail = f"this platform cannot reset the GPU, so MIG mode stays; turn it {mode} from outside the machine"
        raise TransitionRefused(Rule.MODE, detail)
    if gpu.mig_pending and gpu.gpu_instances:
        detail = "another MIG mode waits for a reset and instances stand; reset the GPU or remove them"
        raise TransitionRefused(Rule.PENDING, detail)
    if clients:
        raise TransitionRefused(Rule.BUSY, f"the GPU is in use; stop what uses it before MIG mode is turned {mode}")
    return SetMode(enabled=wanted.mig_enabled)


def _check_room(geometry: MigGeometry, wanted: Layout, beside: list[Part], to_mode: SetMode | None) -> None:
    problem = conflict(geometry, wanted.parts)
    if wanted.parts and not wanted.mig_enabled:
        problem = "instances are wanted with MIG off"
    if problem:
        raise TransitionRefused(Rule.GEOMETRY, f"{problem}; correct the layout")
    if beside and to_mode is not None:
        detail = "an instance that is not this agent's stands; remove it before MIG mode changes"
        raise TransitionRefused(Rule.FOREIGN, detail)
    problem = conflict(geometry, [*wanted.parts, *beside]) if beside else None
    if problem:
        detail = f"{problem}, of which one is not this agent's to remove; remove it, or plan around it"
        raise TransitionRefused(Rule.FOREIGN, detail)


def _destructions(
    surplus: list[GpuInstance],
    kept: dict[tuple[int, int], GpuInstance],
    by_place: dict[tuple[int, int], Part],
    remake: Collection[int],
) -> Iterator[Step]:
    changed = [(instance, by_place[place]) for place, instance in kept.items()]
    everything: list[tuple[GpuInstance, Part | None]] = [*((instance, None) for instance in surplus), *changed]
    for instance, goal in sorted(everything, key=lambda pair: (-pair[0].size, pair[0].start)):
        room = Counter(() if goal is None else goal.compute)
        if instance.id in remake and part_of(instance) != goal:
            room.clear()
        doomed = []
        for child in sorted(instance.compute_instances, key=lambda child: child.id):
            if room[child.profile_id]:
                room[child.profile_id] -= 1
            else:
                doomed.append(child.id)
        for compute_id in reversed(doomed):
            yield DestroyCompute(instance_id=instance.id, compute_id=compute_id)
        if goal is None:
            yield DestroyInstance(instance_id=instance.id)


def _creations(
    geometry: MigGeometry, wanted: Layout, kept: dict[tuple[int, int], GpuInstance], remake: Collection[int]
) -> Iterator[Step]:
    for part in sorted(wanted.parts, key=lambda part: _by_size(geometry, part)):
        instance = kept.get(part.place)
        if instance is None and geometry.profile_by_id(part.profile_id) is None:
            detail = f"{geometry.key} has no profile {part.profile_id}; correct the layout"
            raise TransitionRefused(Rule.GEOMETRY, detail)
        if instance is None:
            yield CreateInstance(profile_id=part.profile_id, start=part.start)
        standing = Counter(() if instance is None else part_of(instance).compute)
        again = instance is not None and instance.id in remake and part_of(instance) != part
        if again:
            standing.clear()
        # Where one order failed, the other is tried: drivers differ in where they put a compute instance.
        order = part.compute if again or standing.total() else creation_order(geometry, part)
        for profile_id in order:
            if standing[profile_id]:
                standing[profile_id] -= 1
            else:
                yield CreateCompute(start=part.start, profile_id=profile_id)


def _by_size(geometry: MigGeometry, part: Part) -> tuple[int, int, int]:
    """Largest first: sort key."""
    profile = geometry.profile_by_id(part.profile_id)
    return -part.size, -(profile.compute_slices if profile else 0), part.start


def _spell(instance: GpuInstance) -> str:
    return f"GPU instance {instance.id} ({instance.profile} at {instance.start})"
