"""Steps as a person reads them: what is done, by the names that the driver prints, and why.

Knows steps, layouts and geometry; decides nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from eelgrid_agent.mig.layout import Layout
from eelgrid_agent.mig.steps import CreateCompute, CreateInstance, DestroyCompute, DestroyInstance, SetMode, Step
from eelgrid_protos.catalogue import GiProfile, MigGeometry
from eelgrid_protos.messages import Gpu, GpuInstance

__all__ = ["Spelled", "spell", "spell_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """One step."""

    step: str
    why: str


def spell(steps: Iterable[Step], gpu: Gpu, wanted: Layout, geometry: MigGeometry) -> tuple[Spelled, ...]:
    """What the steps do to a device that stands as `gpu` says, and why each is taken."""
    steps = tuple(steps)
    doomed = {step.instance_id for step in steps if isinstance(step, DestroyInstance)}
    return tuple(_spell(step, gpu, doomed, wanted, geometry) for step in steps)


def _spell(step: Step, gpu: Gpu, doomed: set[int], wanted: Layout, geometry: MigGeometry) -> Spelled:
    standing = {instance.id: instance for instance in gpu.gpu_instances}
    match step:
        case SetMode(enabled=enabled) if enabled == gpu.mig_enabled:
            other = "off" if enabled else "on"
            return Spelled(step=step.describe(), why=f"MIG mode {other} is pending and not wanted")
        case SetMode(enabled=enabled):
            return Spelled(step=step.describe(), why=f"it is {'off' if enabled else 'on'} and wanted otherwise")
        case DestroyCompute(instance_id=number, compute_id=child):
            why = "its GPU instance goes" if number in doomed else "this share is not wanted"
            return Spelled(step=f"destroy compute instance {child} of {_named(standing[number])}", why=why)
        case DestroyInstance(instance_id=number):
            return Spelled(step=f"destroy {_named(standing[number])}", why="it stands and is not wanted")
        case CreateInstance(profile_id=profile_id, start=start):
            profile = geometry.profile_by_id(profile_id)
            name = profile.name if profile else f"profile {profile_id}"
            return Spelled(step=f"create {name} at {start}", why="it is wanted and does not stand")
        case CreateCompute(start=start, profile_id=profile_id):
            part = wanted.part_at(start)
            profile = geometry.profile_by_id(part.profile_id) if part else None
            return Spelled(
                step=f"create {_share(profile, profile_id)} at {start}", why="work runs in compute instances"
            )


def _named(instance: GpuInstance) -> str:
    return f"GPU instance {instance.id} ({instance.profile} at {instance.start})"


def _share(profile: GiProfile | None, profile_id: int) -> str:
    """A compute instance by its slices, such as 1c.3g.20gb; the whole goes by no share."""
    share = next((ci for ci in profile.compute_instances if ci.id == profile_id), None) if profile else None
    if profile is None or share is None:
        return f"compute instance of profile {profile_id}"
    if share.compute_slices == profile.compute_slices:
        return f"compute instance over all of {profile.name}"
    return f"compute instance {share.compute_slices}c.{profile.name}"


def spell_layout(layout: Layout, geometry: MigGeometry) -> str:
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
