"""The agent of a fault schedule, over all its lives, and what must hold of everything that it says and does.

Asks the keeper of layouts as the node's loop does, holds every answer against
the world's truth, and notes in the world's `broken` where they differ. Owns no
story: what happens, and when, is the schedule's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from bench.fault_world import Crash
from bench.schedule_world import World
from eelgrid_agent.enforce.mig.journal import InstanceOrigin
from eelgrid_agent.enforce.mig.layout import MigLayout, build_layout, read_layout, read_part, resolve_layout
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.enforce.mig.runner import TransitionLimits
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_agent.simulation.gpu import SimHealth
from eelgrid_agent.simulation.mig import SimCompute
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuLayout, NodeEventKind

__all__ = ["LIMITS", "UNASKED_MOST", "Agent", "KeeperMaker", "among", "geometry_of", "keeper_over"]

KeeperMaker = Callable[[World], MigService]

LIMITS = TransitionLimits()
# Repairs, and the going on of what was cut off, until the agent gives up.
UNASKED_MOST = LIMITS.repairs_most + LIMITS.tries_most
_RULES = frozenset(RefusalRule)


def keeper_over(world: World) -> MigService:
    """An agent that starts now."""
    return MigService(
        world,
        world,
        world,
        boot_id=world.boot_id,
        sleep=world.sleep,
        monotonic_s=lambda: world.now_s,
        wall_ns=lambda: int(world.now_s * 1e9),
    )


class Agent:
    """The agent of one schedule, over all its lives."""

    def __init__(self, world: World, make: KeeperMaker) -> None:
        self.world = world
        self._make = make
        self.lives = 0
        self.keeper = make(world)
        # Each MIG UUID: its device, what stood under it when it was told last, and the generation told.
        self._told: dict[str, tuple[str, SimCompute, int]] = {}
        # Those that started anew since, as the agent was told.
        self._anew: set[str] = set()
        self._boot_told = world.boot_id()
        self._unasked = 0

    def start(self) -> None:
        """A new agent, which may die at once; then another."""
        for _ in range(4):
            self.world.died()
            self.lives += 1
            self.keeper = self._make(self.world)
            if self.does(self.keeper.recover) is not None:
                return
            self.world.dangers = replace(self.world.dangers, crash=0.0)

    def does(self, act: Callable[[], object]) -> object:
        """What came of it; None where the agent died of it, and a new one runs now."""
        self._unasked = 0
        try:
            answer = act()
        except Crash:
            self._check_all()
            self.start()
            return None
        self._check_all()
        return answer if answer is not None else True

    def apply(self, layout: GpuLayout) -> None:
        """Asks for a layout and holds the agent to its answer."""
        world, uuid = self.world, layout.gpu_uuid
        self.hear()
        acts, before, record = world.acts, self._own(uuid), world.record(uuid)
        # An undoing goes back to before the first of several layouts that were asked for and not reached.
        fresh = record is None or record.intent is None
        answer = self.does(lambda: self.keeper.apply_layout(layout))
        if isinstance(answer, ApplyResult):
            self._judge(layout, answer, before if fresh and acts == world.acts else None)

    def tend(self) -> None:
        """One round, in which nobody asks for anything."""
        self.hear()
        changes, before, acts = self.world.changes, self._unasked, self.world.acts
        answer = self.does(self.keeper.check_layouts)
        if not isinstance(answer, tuple):
            return
        for result in answer:
            self._typed(result)
        changed = self.world.changes > changes
        self._unasked = before + changed
        # Whoever changes a device by hand, resets it or reboots gives cause for more.
        if acts != self.world.acts:
            self._unasked = 0
        elif self._unasked > UNASKED_MOST * len(self.world.uuids):
            self.world.broken.append(f"{self._unasked} rounds in a row changed a device, and nobody else did")
        self.tell()

    def hear(self) -> None:
        """What a running agent hears of its devices."""
        for uuid in tuple(self.world.resets):
            # An agent that died of the news before hears no more of them.
            if uuid in self.world.resets and self.does(partial(self.keeper.on_device_reset, uuid)) is True:
                self.world.resets.remove(uuid)
                self._anew |= {mig for mig, (gpu, _, _) in self._told.items() if gpu == uuid}

    # What must hold

    def _check_all(self) -> None:
        for record in self.world.records:
            if record.repairs > LIMITS.repairs_most:
                self.world.broken.append(f"{record.repairs} repairs")
        for event in self.keeper.drain_events():
            if event.kind is NodeEventKind.UNSPECIFIED or not event.detail:
                self.world.broken.append(f"an event that says nothing: {event}")

    def _typed(self, result: ApplyResult) -> None:
        if result.status is not ApplyStatus.APPLIED and (result.rule not in _RULES or not result.detail):
            self.world.broken.append(f"neither done nor refused by a rule: {result}")

    def _judge(self, layout: GpuLayout, result: ApplyResult, before: MigLayout | None) -> None:
        world, uuid = self.world, layout.gpu_uuid
        self._typed(result)
        gpu, record = world.node.get_device(uuid).identity, world.record(uuid)
        if result.status is ApplyStatus.APPLIED:
            if not self._stands(layout, gpu):
                world.broken.append(f"said to be applied: {layout}, and {read_layout(gpu)} stands")
        elif record is not None and record.intent is None and before is not None and self._own(uuid) != before:
            kept = before.mig_enabled == gpu.mig_enabled or not geometry_of(world, uuid).reset_to_change_mode
            if kept or self._own(uuid).parts:
                world.broken.append(
                    f"refused ({result.rule}: {result.detail}) from {before} and left at {read_layout(gpu)}"
                )

    def _stands(self, layout: GpuLayout, gpu: Gpu) -> bool:
        if not gpu.mig_capable:
            return not layout.mig_enabled
        goal = resolve_layout(layout, geometry_of(self.world, gpu.uuid))
        standing, known = set(read_layout(gpu).parts), self._known(gpu.uuid)
        foreign = {part for part in standing if known.get(part.place, InstanceOrigin.FOREIGN) is InstanceOrigin.FOREIGN}
        alike = gpu.mig_enabled == goal.mig_enabled and not gpu.mig_pending
        return alike and set(goal.parts) <= standing and standing - set(goal.parts) <= foreign

    def _known(self, uuid: str) -> Mapping[tuple[int, int], InstanceOrigin]:
        record = self.world.record(uuid)
        return {} if record is None else record.known

    def _own(self, uuid: str) -> MigLayout:
        gpu = self.world.node.get_device(uuid)
        parts = [read_part(one.value) for one in gpu.mig.instances.values() if one not in self.world.strangers]
        return build_layout(gpu.mig.enabled, parts)

    def has_told(self, child: SimCompute) -> bool:
        """Whether the newest inventory has this one, with a generation."""
        return child.uuid not in self._anew and child.uuid in self._told and self._told[child.uuid][1] is child

    def tell(self) -> None:
        """The inventory goes out, and what it says of generations must be so."""
        world = self.world
        if world.boot_id() != self._boot_told:
            self._boot_told = world.boot_id()
            self._anew |= set(self._told)
        listed = [gpu.identity for gpu in world.node.devices if gpu.health is SimHealth.OK]
        for gpu in self.keeper.stamp_gpus(listed):
            for instance in gpu.gpu_instances:
                held = world.node.get_device(gpu.uuid).mig.instances[instance.id]
                for child in instance.compute_instances:
                    self._count(gpu.uuid, child.uuid, held.compute[child.id], child.generation)

    def _count(self, gpu: str, uuid: str, stands: SimCompute, generation: int) -> None:
        if not generation:
            # Not looked at yet.
            return
        known = self._told.get(uuid)
        if known is not None:
            _, before, told = known
            # What others made again where it stood cannot be told from it, unless the device started anew.
            seen = among(stands, self.world.made) or uuid in self._anew
            if generation < told or (generation == told and before is not stands and seen):
                self.world.broken.append(f"{uuid} was told as generation {told}, is another, and is now {generation}")
            leased = self.world.leased.get(uuid) is stands
            if before is stands and leased and generation != told:
                self.world.broken.append(f"{uuid} is leased and went from generation {told} to {generation}")
        self._told[uuid] = gpu, stands, generation
        self._anew.discard(uuid)


def geometry_of(world: World, uuid: str) -> MigGeometry:
    """The geometry of a device that has MIG."""
    geometry = world.node.get_device(uuid).mig.geometry
    assert geometry is not None, "asked of parts with MIG only"
    return geometry


def among(one: object, others: Collection[object]) -> bool:
    """Whether it is one of them: the same, not only like it."""
    return any(one is other for other in others)
