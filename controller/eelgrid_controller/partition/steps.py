"""From what runs to what shall run: ordered steps, GPU by GPU, and how low each service falls on the way.

Owns the order. Must not know why the change is wanted, nor how a step is done: a
driver's calls are the agent's, which takes the layout after each GPU's steps.

Theory: on one GPU a replica is drained before its instance is destroyed, all that
goes is destroyed before anything is made (MIG mode in between, on an empty GPU),
and a replica starts when its instance stands. Across GPUs, what needs no draining
comes first, since it only adds; then, one at a time, the GPU whose draining leaves
every service at its rate, or if there is none, the one that leaves the worst
service highest. What cannot be kept is told, not hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.partition.plan import PartitionReplica
from eelgrid_controller.partition.running import RunningGpu, RunningInstance, layout_message
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import GpuLayout


class DrainStep(NamedTuple):
    """No new requests to a replica; it ends when it has answered the last."""

    uuid: str
    start: int  # of its instance; 0 on a whole GPU
    replica: PartitionReplica


class DestroyStep(NamedTuple):
    """An empty instance goes."""

    uuid: str
    profile: str
    start: int


class SetModeStep(NamedTuple):
    """MIG on or off, on an empty GPU."""

    uuid: str
    enabled: bool


class CreateStep(NamedTuple):
    """An instance is made at exactly this place."""

    uuid: str
    profile: str
    start: int


class StartStep(NamedTuple):
    """A replica starts in the instance that begins there; on the whole GPU where MIG is off."""

    uuid: str
    start: int
    replica: PartitionReplica


PartitionStep = DrainStep | DestroyStep | SetModeStep | CreateStep | StartStep
_ROUNDING = 1e-9


class GpuSteps(NamedTuple):
    """What one GPU does at a time: drains, then the layout (None: it stays as it is), then starts."""

    uuid: str
    node: str
    steps: tuple[PartitionStep, ...]
    layout: GpuLayout | None


class StepSequence(NamedTuple):
    """Steps in order; `lowest`: of services that fall below their rate on the way, the least share of it served."""

    steps: tuple[PartitionStep, ...]
    lowest: Mapping[str, float]


def order_steps(
    before: Sequence[RunningGpu],
    after: Sequence[RunningGpu],
    geometries: Mapping[str, MigGeometry | None],
    rate_hz: Mapping[str, float],
) -> StepSequence:
    """The steps from one state of GPUs to another, the same GPUs in the same order; geometries by model."""
    adding: list[tuple[PartitionStep, ...]] = []
    turning: list[tuple[PartitionStep, ...]] = []
    for old, new in zip(before, after, strict=True):
        if old != new:
            first, second = _halves(old, new, geometries[old.model])
            adding += [first] if first else []
            turning += [second] if second else []
    served: dict[str, float] = {}
    for gpu in before:
        for replica in gpu.replicas():
            served[replica.owner] = served.get(replica.owner, 0.0) + replica.throughput_hz
    steps: list[PartitionStep] = []
    lowest: dict[str, float] = {}
    while adding or turning:
        if adding:
            chosen = adding.pop(0)
        else:
            worst = [
                min((share for _, share in _rates_while_drained(part, served, rate_hz)), default=1.0)
                for part in turning
            ]
            # The first of those that hurt least.
            chosen = turning.pop(max(range(len(turning)), key=lambda number: (min(1.0, worst[number]), -number)))
        for owner, share in _rates_while_drained(chosen, served, rate_hz):
            if share < 1.0 - _ROUNDING:
                lowest[owner] = min(lowest.get(owner, 1.0), share)
        for step in chosen:
            if isinstance(step, DrainStep | StartStep):
                gained_hz = step.replica.throughput_hz if isinstance(step, StartStep) else -step.replica.throughput_hz
                served[step.replica.owner] = served.get(step.replica.owner, 0.0) + gained_hz
        steps += chosen
    return StepSequence(tuple(steps), lowest)


def apply_steps(
    gpus: Sequence[RunningGpu], steps: Sequence[PartitionStep]
) -> Iterator[tuple[PartitionStep, RunningGpu]]:
    """Each step with its GPU as it stands afterwards; what agents are asked for is made of these."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for step in steps:
        by_uuid[step.uuid] = _after(by_uuid[step.uuid], step)
        yield step, by_uuid[step.uuid]


def group_steps_by_gpu(
    gpus: Sequence[RunningGpu], steps: Sequence[PartitionStep], geometries: Mapping[str, MigGeometry | None]
) -> Iterator[GpuSteps]:
    """The steps as an agent takes them: drains first, then one layout, then starts; by GPU in the order of the steps."""
    group: list[PartitionStep] = []
    last: RunningGpu | None = None
    for step, gpu in apply_steps(gpus, steps):
        if last is not None and (
            last.uuid != step.uuid or (isinstance(group[-1], StartStep) and not isinstance(step, StartStep))
        ):
            yield _gpu_steps(last, group, geometries[last.model])
            group = []
        group.append(step)
        last = gpu
    if last is not None:
        yield _gpu_steps(last, group, geometries[last.model])


def _gpu_steps(gpu: RunningGpu, group: Sequence[PartitionStep], geometry: MigGeometry | None) -> GpuSteps:
    changes = any(isinstance(step, DestroyStep | SetModeStep | CreateStep) for step in group)
    return GpuSteps(
        gpu.uuid, gpu.node, tuple(group), layout_message(gpu, geometry) if changes and geometry is not None else None
    )


def _rates_while_drained(
    part: Sequence[PartitionStep], served: Mapping[str, float], rate_hz: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Share of its rate that each service keeps once all these drains are done."""
    left: dict[str, float] = {}
    for step in part:
        if isinstance(step, DrainStep):
            owner = step.replica.owner
            left[owner] = left.get(owner, served.get(owner, 0.0)) - step.replica.throughput_hz
    for owner, left_hz in left.items():
        asked_hz = rate_hz.get(owner, 0.0)
        yield owner, max(0.0, left_hz / asked_hz) if asked_hz > 0.0 else 1.0


def _after(gpu: RunningGpu, step: PartitionStep) -> RunningGpu:
    match step:
        case SetModeStep(enabled=enabled):
            return gpu._replace(mig_enabled=enabled)
        case CreateStep(profile=profile, start=start):
            made = (*gpu.instances, RunningInstance(profile, start))
            return gpu._replace(instances=tuple(sorted(made, key=lambda one: one.start)))
        case DestroyStep(start=start):
            return gpu._replace(instances=tuple(one for one in gpu.instances if one.start != start))
    replica = step.replica if isinstance(step, StartStep) else None
    if not gpu.mig_enabled:
        return gpu._replace(whole=replica)
    return gpu._replace(
        instances=tuple(one._replace(replica=replica) if one.start == step.start else one for one in gpu.instances)
    )


def _halves(
    old: RunningGpu, new: RunningGpu, geometry: MigGeometry | None
) -> tuple[tuple[PartitionStep, ...], tuple[PartitionStep, ...]]:
    """The steps of one GPU that need no draining, and the rest; all are of the first kind if none drains."""
    was = {(one.profile, one.start): one for one in old.instances}
    shall = {(one.profile, one.start): one for one in new.instances}
    uuid = old.uuid
    drains = [
        DrainStep(uuid, start, one.replica)
        for (profile, start), one in was.items()
        if one.replica is not None and ((profile, start) not in shall or shall[profile, start].replica != one.replica)
    ]
    drains += [DrainStep(uuid, 0, old.whole)] if old.whole is not None and old.whole != new.whole else []
    destroys = [DestroyStep(uuid, *place) for place in was if place not in shall]
    modes = [SetModeStep(uuid, new.mig_enabled)] if old.mig_enabled != new.mig_enabled else []
    creates = [CreateStep(uuid, *place) for place in shall if place not in was]
    starts = [
        StartStep(uuid, start, one.replica)
        for (profile, start), one in shall.items()
        if one.replica is not None and ((profile, start) not in was or was[profile, start].replica != one.replica)
    ]
    starts += [StartStep(uuid, 0, new.whole)] if new.whole is not None and old.whole != new.whole else []
    if not drains:
        return (*destroys, *modes, *creates, *starts), ()
    early: list[CreateStep] = []
    if geometry is not None and not modes:
        standing = [(geometry.profiles[one.profile], one.start) for one in old.instances]
        for one in creates:
            beside = [(geometry.profiles[made.profile], made.start) for made in (*early, one)]
            if geometry.conflict([*standing, *beside]) is None:
                early.append(one)
    idle = {one.start for one in old.instances if one.replica is None and (one.profile, one.start) in shall}
    ready = {one.start for one in early} | idle
    first = [one for one in starts if one.start in ready and not modes and new.mig_enabled]
    rest = [one for one in starts if one not in first]
    return (*early, *first), (*drains, *destroys, *modes, *(one for one in creates if one not in early), *rest)
