"""Fault schedules on the agent's MIG half: a seed is a node, a story of what happens to it, and what must hold.

A schedule asks for layouts and lets the agent tend them while processes come
and go, others lay out the same GPUs, devices hang, vanish and are reset, the
driver is loaded anew, the machine boots, calls fail, and the agent dies between
any two of its calls. What holds after every act, and once all is quiet:

- what is in use, leased or somebody else's is never touched
- what is said to be applied stands; a refusal names its rule, and what it changed is undone
- generations only rise, and rise with every instance that is made anew
- repairs are bounded, and a device at rest is left alone
- at rest nothing of the agent's is half made, the journal says what stands, and every device can be cleared again
"""

import random
from dataclasses import replace

from bench.fault_world import Tally, tally_seeds
from bench.schedule_agent import LIMITS, UNASKED_MOST, Agent, KeeperMaker, among, geometry_of, keeper_over
from bench.schedule_world import Dangers, World
from eelgrid_agent.devices.port import DeviceError
from eelgrid_agent.enforce.mig.journal import InstanceOrigin, MigRecord
from eelgrid_agent.enforce.mig.layout import InstancePart, build_layout, read_layout
from eelgrid_agent.enforce.mig.layout_requests import to_gpu_layout
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.state_files import StateFileError
from eelgrid_protos.messages import AccessLevel, ApplyStatus, GpuLayout

__all__ = ["check_schedules", "run_schedule"]

_STEPS = (6, 26)
_SETTLE_ROUNDS = 14
_ACTS = (
    "apply",
    "apply",
    "apply",
    "apply",
    "check",
    "check",
    "check",
    "hold",
    "process",
    "ends",
    "stranger",
    "removal",
    "hang",
    "lose",
    "restore",
    "restore",
    "reset",
    "reload",
    "reboot",
    "noise",
    "rights",
    "client",
    "client gone",
    "die",
    "die",
    "silence",
    "release",
    "adopt",
    "hold",
    "hold",
    "hostile",
    "alike",
)


# The story


def random_layout(gpu: SimGpu, chance: random.Random) -> GpuLayout:
    """A layout that may be asked for; often near to what stands, now and then one that cannot stand."""
    uuid, geometry = gpu.identity.uuid, gpu.mig.geometry
    if geometry is None or chance.random() < 0.12:
        return GpuLayout(gpu_uuid=uuid)
    parts: list[InstancePart] = []
    if chance.random() < 0.6:
        parts = [part for part in read_layout(gpu.identity).parts if chance.random() < 0.7 and part.compute]
    profiles = list(geometry.profiles.values())
    for _ in range(chance.randrange(0, 6)):
        profile = chance.choice(profiles)
        start = chance.choice(profile.starts)
        known = [(one, part.start) for part in parts if (one := geometry.profile_by_id(part.profile_id)) is not None]
        if geometry.conflict([*known, (profile, start)]) is None:
            share = chance.choice(profile.compute_instances)
            compute = (share.id,) * chance.randrange(1, share.most + 1)
            if chance.random() < 0.7:
                compute = (profile.whole.id,)
            parts.append(InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=compute))
    layout = to_gpu_layout(build_layout(True, parts), uuid, geometry)
    if layout.instances and chance.random() < 0.03:
        layout = replace(layout, instances=(*layout.instances, layout.instances[0]))
    return layout


def _step(agent: Agent, what: str) -> None:
    world, chance = agent.world, agent.world.chance
    gpu = chance.choice(world.node.devices)
    uuid = gpu.identity.uuid
    match what:
        case "apply":
            agent.apply(random_layout(gpu, chance))
        case "check":
            agent.tend()
        case "hold":
            _hold(agent)
        case "hostile":
            _hostile(agent, gpu)
        case "alike":
            world.reset_and_mirror(gpu)
        case "silence":
            for _ in range(3):
                world.now_s += chance.choice((60.0, 4000.0))
                agent.tend()
        case "reboot":
            world.boots += 1
            world.acts += 1
            world.faults.reboot_node()
            agent.start()
        case "die":
            agent.start()
        case "release":
            uuid = next((record.uuid for record in world.records if record.intent is not None), uuid)
            agent.does(lambda: agent.keeper.release_device(uuid))
        case "adopt":
            _adopt(agent, uuid)
        case _:
            world.act(what)


def _hostile(agent: Agent, gpu: SimGpu) -> None:
    """Somebody takes an instance away again and again: the agent gives up in the end."""
    world, repaired, lives = agent.world, 0, agent.lives
    for _ in range(UNASKED_MOST + 4):
        mine = [one.id for one in gpu.mig.instances.values() if one not in world.strangers]
        if not mine or gpu.health is not SimHealth.OK or not world.node.driver_loaded:
            return
        world.faults.destroy_foreign_instance(gpu.identity.uuid, world.chance.choice(mine))
        acts, changes = world.acts, world.changes
        agent.tend()
        if acts != world.acts or lives != agent.lives:
            return
        repaired += world.changes > changes
    if repaired > LIMITS.repairs_most:
        world.broken.append(f"{repaired} repairs against somebody who does not stop")


def _hold(agent: Agent) -> None:
    """The controller places work: the leases of before are gone, and these are there."""
    world, chance = agent.world, agent.world.chance
    agent.hear()
    # Leases are of what an inventory told.
    agent.tell()
    children = [
        child
        for gpu in world.node.devices
        if gpu.health is SimHealth.OK
        for one in gpu.mig.instances.values()
        for child in one.compute.values()
        if agent.has_told(child)
    ]
    chosen = {child.uuid: child for child in children if chance.random() < 0.6}
    acts = world.acts
    world.leased = {}
    done = agent.does(lambda: agent.keeper.hold_devices(frozenset(chosen)))
    if done is True and acts == world.acts:
        world.leased = chosen


def _adopt(agent: Agent, uuid: str) -> None:
    """An operator gives the agent what others made, which may be refused."""
    world = agent.world

    def adopt() -> None:
        try:
            agent.keeper.executor.adopt_instances(uuid)
        except (TransitionRefused, DeviceError, StateFileError):
            # Then they are as foreign as they were, and only watched no more.
            return

    standing = list(world.node.get_device(uuid).mig.instances.values())
    world.strangers = [one for one in world.strangers if one not in standing]
    agent.does(adopt)


def run_schedule(seed: int, make: KeeperMaker = keeper_over) -> str:
    """What was broken in the schedule of this seed, or nothing."""
    chance = random.Random(seed)
    world = World(chance)
    agent = Agent(world, make)
    agent.start()
    world.dangers = Dangers.draw(chance)
    for _ in range(chance.randrange(*_STEPS)):
        under_way = any(record.intent is not None for record in world.records)
        _step(agent, "release" if under_way and chance.random() < 0.1 else chance.choice(_ACTS))
        _survivors(world)
        if world.broken:
            return world.broken[0]
    _settle(agent)
    _at_rest(agent)
    return world.broken[0] if world.broken else _cleared(agent)


def _survivors(world: World) -> None:
    """Whoever runs on an instance still has it: others took their processes away with theirs."""
    for gpu in world.node.devices:
        for pid, (number, child) in gpu.mig.holds.items():
            if number is not None and child not in gpu.mig.get_instance(number).compute:
                world.broken.append(f"process {pid} lost compute instance {child} of {number}")


def _settle(agent: Agent) -> None:
    """The world comes to rest; processes, leases and what others made stay."""
    world = agent.world
    world.dangers = Dangers()
    world.faults.set_rights(AccessLevel.ROOT)
    world.faults.load_driver()
    for gpu in world.node.devices:
        if gpu.health is SimHealth.LOST:
            world.resets.append(gpu.identity.uuid)
        world.faults.restore_gpu(gpu.identity.uuid)
        gpu.mig.clients.clear()
    for _ in range(_SETTLE_ROUNDS):
        _operator_resets(world)
        agent.tend()
        world.sleep(1.0)


def _operator_resets(world: World) -> None:
    """Somebody resets a device whose mode waits for it, once nothing runs there."""
    for gpu in world.node.devices:
        if gpu.mig.enabled != gpu.mig.pending and not gpu.mig.holds:
            world.acts += 1
            world.resets.append(gpu.identity.uuid)
            world.faults.reset_gpu(gpu.identity.uuid)


def _at_rest(agent: Agent) -> None:
    world = agent.world
    changes = world.changes
    agent.tend()
    if world.changes != changes:
        world.broken.append(f"{world.changes - changes} changes at rest")
    for gpu in world.node.devices:
        record = world.record(gpu.identity.uuid)
        if record is None:
            world.broken.append("a device of which nothing is written down")
        else:
            _truthful(agent, gpu, record)


def _truthful(agent: Agent, gpu: SimGpu, record: MigRecord) -> None:
    """The journal says what stands, and whose; nothing is under way or half made."""
    world, uuid = agent.world, gpu.identity.uuid
    standing = {(one.profile.id, one.start): one for one in gpu.mig.instances.values()}
    if record.intent is not None and not (gpu.mig.enabled != gpu.mig.pending and gpu.mig.holds):
        world.broken.append(f"still under way at rest: {record.intent}")
        return
    if set(record.known) != set(standing):
        world.broken.append(f"the journal knows {set(record.known)} and {set(standing)} stand")
        return
    for place, one in standing.items():
        origin = record.known[place]
        if among(one, world.strangers) and origin is not InstanceOrigin.FOREIGN:
            world.broken.append(f"{one.value} is somebody else's and written down as {origin}")
        if among(one, world.made) and origin is InstanceOrigin.FOREIGN:
            world.broken.append(f"{one.value} was made by the agent and written down as {origin}")
    for number in record.find_orphans(gpu.identity):
        one = gpu.mig.instances[number]
        if among(one, world.made) and number not in world.users(uuid):
            world.broken.append(f"leaked: {one.value} with {record}")
    if record.target is not None and not record.has_layout(gpu.identity, record.target) and not record.gave_up:
        try:
            agent.keeper.executor.plan_layout(to_gpu_layout(record.target, uuid, geometry_of(world, uuid)))
        except TransitionRefused:
            return
        world.broken.append(f"{record.target} is to stand, could, and {read_layout(gpu.identity)} does; {record}")


def _cleared(agent: Agent) -> str:
    """Nothing is wedged: once nobody uses anything, whatever is not somebody else's goes when asked."""
    world = agent.world
    world.leased = {}
    agent.keeper.hold_devices(())
    for gpu in world.node.devices:
        uuid = gpu.identity.uuid
        gpu.mig.holds.clear()
        for _ in range(_SETTLE_ROUNDS):
            # What was to be refused some time and never was is in the way still.
            _operator_resets(world)
            agent.hear()
            result = agent.keeper.apply_layout(GpuLayout(gpu_uuid=uuid, mig_enabled=gpu.mig.enabled))
            if result.status is ApplyStatus.APPLIED:
                break
        record = world.record(uuid)
        foreign = set() if record is None else {p for p, o in record.known.items() if o is InstanceOrigin.FOREIGN}
        left = [one.value for one in gpu.mig.instances.values() if (one.profile.id, one.start) not in foreign]
        if result.status is not ApplyStatus.APPLIED or left:
            return f"wedged: {result} with {left} and {record}"
    return world.broken[0] if world.broken else ""


def check_schedules(seed: int, count: int) -> Tally:
    """So many schedules from a seed on."""
    return tally_seeds(run_schedule, seed, count)
