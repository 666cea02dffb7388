"""Crashes at every step of MIG transitions, then a restart: finished or undone, nothing leaked, nothing in use lost.

A scenario is drawn from its seed: a part, what stands, what is wanted, who uses
what, what is foreign, what the driver does wrong. It runs once to count its
moments (before and after every change of the device and every write of the
journal) and then once for each moment, at which the agent dies; some deaths
take the machine or the device with them, some are followed by another.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.fault_world import NEVER, Crash, CrashPoints, MemoryJournal, Tally
from bench.mig_device import Fault, MigDevice
from bench.naive_partitioner import Instance, State, fits, moves
from bench.node_transitions import random_state
from bench.simulated_mig import SimulatedMig, simulated_geometries
from eelgrid_agent.devices.port import DeviceInUse, DeviceTimeout, InsufficientResources, NoPermission
from eelgrid_agent.enforce.mig.journal import MigRecord
from eelgrid_agent.enforce.mig.layout import MigLayout, build_layout, read_layout
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ApplyStatus, GpuLayout, WantedInstance

__all__ = ["Rig", "Scenario", "check_crashes", "check_simulated_crashes", "draw", "run"]

AnyDevice = MigDevice | SimulatedMig
Maker = Callable[..., AnyDevice]

_ROUNDS_MOST = 12
_DEATHS = ("agent", "agent", "agent", "reboot", "reset")


def _fault_lists() -> dict[str, tuple[Fault, ...]]:
    full, used = InsufficientResources("insufficient resources"), DeviceInUse("in use by another client")
    late, barred = DeviceTimeout("no answer in time"), NoPermission("no permission")
    calls = ("create_gpu_instance", "create_compute_instance", "destroy_gpu_instance", "destroy_compute_instance")
    return {
        "nothing": (),
        "full once": (Fault("create_gpu_instance", full),),
        "full": (Fault("create_gpu_instance", full),) * 6,
        "no compute once": (Fault("create_compute_instance", full),),
        "no compute": (Fault("create_compute_instance", full),) * 6,
        "in use for a while": (Fault("destroy_gpu_instance", used),) * 3,
        "in use": (Fault("destroy_gpu_instance", used),) * 12,
        "mode in use": (Fault("set_mig_mode", used),) * 3,
        "late and done": tuple(Fault(call, late, after=True) for call in calls),
        "late and not done": tuple(Fault(call, late) for call in calls),
        "barred": (Fault("create_gpu_instance", barred),) * 2,
    }


@dataclass(frozen=True)
class Scenario:
    """One transition and what goes wrong with it."""

    seed: int
    geometry: MigGeometry
    start: State
    goal: State
    # Places (profile id, start): with a process on them, and somebody else's.
    used: frozenset[tuple[int, int]] = frozenset()
    foreign: frozenset[Instance] = frozenset()
    # Whether the agent made what stands at first, or found it.
    made: bool = False
    fault: str = "nothing"
    lag_s: float = 0.0


@dataclass
class Rig:
    """A device, a journal that outlives the agent, and the agent of now."""

    device: AnyDevice
    journal: MemoryJournal[MigRecord]
    hook: CrashPoints
    boots: int = 1
    executor: LayoutReconciler = field(init=False)

    def __post_init__(self) -> None:
        self.start_agent()

    @classmethod
    def of(cls, geometry: MigGeometry, *, mig_enabled: bool = True, device: Maker = MigDevice) -> "Rig":
        """An empty device."""
        hook = CrashPoints()
        return cls(device(geometry, hook, mig_enabled=mig_enabled), MemoryJournal(hook), hook)

    def start_agent(self) -> None:
        """A new agent over the same device and journal."""
        self.executor = LayoutReconciler(
            self.device,
            self.device,
            self.journal,
            boot_id=lambda: f"boot-{self.boots}",
            sleep=self.device.sleep,
            monotonic_s=lambda: self.device.now_s,
            wall_ns=lambda: int(self.device.now_s * 1e9),
        )

    def reboot(self) -> None:
        """The machine goes and comes back."""
        self.device.reboot()
        self.boots += 1

    def layout(self) -> MigLayout:
        """What stands."""
        return read_layout(self.device.gpus()[0])

    def generations(self) -> dict[str, tuple[int, int]]:
        """Each MIG UUID that stands, its serial and the generation that the agent tells."""
        told = {}
        for instance in self.executor.stamp_gpu(self.device.gpus()[0]).gpu_instances:
            held = self.device.held[instance.id]
            for child in instance.compute_instances:
                told[child.uuid] = (held.compute[child.id][2], child.generation)
        return told


def spelled(geometry: MigGeometry, uuid: str, state: State) -> GpuLayout:
    """A state as the controller asks for it."""
    instances = []
    for profile_id, start, compute in sorted(state.instances, key=lambda instance: instance[1]):
        profile = geometry.profile_by_id(profile_id)
        assert profile is not None
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        parts = tuple(slices[ci] for ci in compute)
        instances.append(WantedInstance(profile=profile.name, start=start, compute_slices=parts))
    return GpuLayout(gpu_uuid=uuid, mig_enabled=state.mig_enabled, instances=tuple(instances))


def _sound(state: State) -> State:
    """What can be asked for: every instance has a compute instance."""
    return State(state.mig_enabled, frozenset(i for i in state.instances if i[2]))


def draw(seed: int, geometries: Sequence[MigGeometry]) -> Scenario:
    """The scenario of a seed, on one of these parts."""
    chance = random.Random(seed)
    geometry = chance.choice(geometries)
    start = _sound(random_state(geometry, chance, chance.randrange(2, 10)))
    goal = _sound(random_state(geometry, chance, chance.randrange(2, 12)))
    if chance.random() < 0.4:
        goal = start
        for _ in range(chance.randrange(1, 5)):
            goal = chance.choice(list(moves(geometry, goal, frozenset())))
        goal = _sound(goal)
    way = chance.random()
    if way < 0.12:
        goal = State(False, frozenset())
    elif way < 0.24:
        start = State(False, frozenset())
    common = start.instances & goal.instances
    used = frozenset(i[:2] for i in start.instances if chance.random() < (0.6 if i in common else 0.04))
    foreign: frozenset[Instance] = frozenset()
    if start.mig_enabled and goal.mig_enabled and chance.random() < 0.3:
        foreign = _stranger(geometry, start, goal, chance)
    return Scenario(
        seed=seed,
        geometry=geometry,
        start=start,
        goal=goal,
        used=used,
        foreign=foreign,
        made=chance.random() < 0.5,
        fault=chance.choice(list(_fault_lists())),
        lag_s=chance.choice((0.0, 0.0, 0.3)),
    )


def _stranger(geometry: MigGeometry, start: State, goal: State, chance: random.Random) -> frozenset[Instance]:
    """An instance that leaves room for both."""
    places = [(profile, first) for profile in geometry.profiles.values() for first in profile.starts]
    chance.shuffle(places)
    for profile, first in places:
        stranger: Instance = (profile.id, first, (profile.whole.id,) if chance.random() < 0.7 else ())
        apart = all(stranger[:2] != i[:2] for i in start.instances | goal.instances)
        if apart and all(fits(geometry, state.instances | {stranger}) for state in (start, goal)):
            return frozenset({stranger})
    return frozenset()


def _prepared(scenario: Scenario, device: Maker) -> Rig:
    """The device as it stands when the layout is asked for, under an agent that knows it."""
    rig = Rig.of(scenario.geometry, mig_enabled=scenario.start.mig_enabled, device=device)
    if not scenario.made:
        for profile_id, start, compute in sorted(scenario.start.instances):
            rig.device.stand(profile_id, start, tuple(reversed(compute)))
    rig.executor.recover()
    if scenario.made:
        result = rig.executor.apply_layout(spelled(scenario.geometry, rig.device.uuid, scenario.start))
        assert result.status is ApplyStatus.APPLIED, result
    for profile_id, start, compute in scenario.foreign:
        rig.device.stand(profile_id, start, compute, foreign=True)
    for pid, held in enumerate(rig.device.held.items(), 1):
        number, instance = held
        if (instance.profile.id, instance.start) in scenario.used:
            rig.device.users[pid] = (number, min(instance.compute))
    rig.executor.check_layouts()
    rig.device.faults = list(_fault_lists()[scenario.fault])
    rig.device.lag_s = scenario.lag_s
    rig.hook.passed, rig.hook.names = 0, []
    return rig


def run(
    scenario: Scenario, *, crash_at: int, death: str = "agent", again_at: int = NEVER, on: Maker = MigDevice
) -> tuple[str, int]:
    """What went wrong, or nothing, and how many moments there were; a crash at NEVER does not come."""
    rig = _prepared(scenario, on)
    device, before = rig.device, rig.layout()
    told, serials = rig.generations(), device.serials()
    strangers = {n: s for n, s in serials.items() if s[0] in device.foreign}
    in_use = {gi: serials[gi] for gi, _ in device.users.values() if gi is not None}
    rig.hook.at = crash_at
    lives = 1
    try:
        rig.executor.apply_layout(spelled(scenario.geometry, device.uuid, scenario.goal))
    except Crash:
        lives = 0
        if death == "reboot":
            rig.reboot()
        elif death == "reset":
            device.reset()
    moments = rig.hook.passed
    rig.hook.passed, rig.hook.at = 0, again_at
    for _ in range(_ROUNDS_MOST):
        try:
            if not lives:
                rig.start_agent()
                lives = 1
                if death == "reset":
                    rig.executor.on_device_reset(device.uuid)
                rig.executor.recover()
            _operator_resets(rig)
            rig.executor.check_layouts()
        except Crash:
            lives = 0
            rig.hook.disarm()
        device.sleep(1.0)
    rig.hook.disarm()
    gone = crash_at >= 0 and death != "agent"
    problem = _verdict(scenario, rig, before, gone=gone) or _kept(rig, {} if gone else strangers | in_use)
    problem = problem or _generations(rig, told, in_use={} if gone else in_use)
    return problem or _free_again(rig), moments


def _operator_resets(rig: Rig) -> None:
    """Somebody resets a device whose mode is pending, as soon as nothing runs on it."""
    if rig.device.mig_enabled != rig.device.mig_pending and not rig.device.users:
        rig.device.reset()
        rig.executor.on_device_reset(rig.device.uuid)


def _verdict(scenario: Scenario, rig: Rig, before: MigLayout, *, gone: bool) -> str:
    """Finished or undone, and nothing in between."""
    device, record = rig.device, rig.executor.record(rig.device.uuid)
    if device.violations:
        return device.violations[0]
    if record.intent is not None:
        return f"still under way: {record.intent}"
    foreign = {h.start for h in device.held.values() if h.serial in device.foreign}
    own = build_layout(rig.layout().mig_enabled, (p for p in rig.layout().parts if p.start not in foreign))
    goal = State(scenario.goal.mig_enabled, scenario.goal.instances)
    ends = [_layout(scenario.geometry, goal), replace(before, parts=_less(before, scenario))]
    if own.mig_enabled:
        # Undone as far as a mode that needs a reset allows.
        ends += [MigLayout(mig_enabled=True)] * (not before.mig_enabled)
    else:
        ends += [MigLayout(mig_enabled=False)] * gone
    if gone and record.target is None:
        # What was never asked for need not come back, but an undoing may bring it.
        ends.append(MigLayout(mig_enabled=own.mig_enabled))
    return "" if own in ends else f"ends at {own} with {record}"


def _less(layout: MigLayout, scenario: Scenario) -> tuple[object, ...]:
    places = {instance[:2] for instance in scenario.foreign}
    return tuple(part for part in layout.parts if part.place not in places)


def _layout(geometry: MigGeometry, state: State) -> MigLayout:
    rig = Rig.of(geometry, mig_enabled=state.mig_enabled)
    for profile_id, start, compute in sorted(state.instances):
        rig.device.stand(profile_id, start, tuple(reversed(compute)))
    return rig.layout()


def _kept(rig: Rig, kept: dict[int, tuple[int, ...]]) -> str:
    """What was in use or somebody else's is the very same."""
    now = rig.device.serials()
    lost = [number for number, serials in kept.items() if now.get(number) != serials]
    return f"GPU instances {lost} were in use or foreign and are not the same" if lost else ""


def _generations(rig: Rig, told: dict[str, tuple[int, int]], in_use: dict[int, tuple[int, ...]]) -> str:
    """Another instance under the same UUID has a higher generation; one in use keeps its own."""
    held = {serial for serials in in_use.values() for serial in serials[1:]}
    for uuid, (serial, generation) in rig.generations().items():
        earlier = told.get(uuid)
        if earlier is None:
            continue
        if serial != earlier[0] and generation <= earlier[1]:
            return f"{uuid} was made anew and is still generation {generation}"
        if serial in held and generation != earlier[1]:
            return f"{uuid} is in use and its generation went from {earlier[1]} to {generation}"
    return ""


def _free_again(rig: Rig) -> str:
    """Nothing is wedged: once nobody uses anything, all that is not foreign can be cleared away."""
    rig.device.users.clear()
    rig.device.faults.clear()
    _operator_resets(rig)
    empty = GpuLayout(gpu_uuid=rig.device.uuid, mig_enabled=rig.device.mig_enabled)
    result = rig.executor.apply_layout(empty)
    standing = [h for h in rig.device.held.values() if h.serial not in rig.device.foreign]
    if result.status is not ApplyStatus.APPLIED or standing:
        return f"wedged: {result} with {standing}"
    return ""


def check_crashes(seed: int, count: int, *, on: Maker = MigDevice) -> Tally:
    """Scenarios of so many seeds, each with a death at every one of its moments."""
    tally = Tally()
    geometries = simulated_geometries() if on is SimulatedMig else list(load_catalogue().geometries.values())
    for number in range(seed, seed + count):
        scenario, chance = draw(number, geometries), random.Random(f"death/{number}")
        problem, moments = run(scenario, crash_at=NEVER, on=on)
        tally.count(problem and f"seed {number}, no crash: {problem}")
        for moment in range(moments):
            death, again = chance.choice(_DEATHS), chance.choice((NEVER, chance.randrange(20)))
            problem, _ = run(scenario, crash_at=moment, death=death, again_at=again, on=on)
            tally.count(problem and f"seed {number}, {death} dies at {moment}, then {again}: {problem}")
    return tally


def check_simulated_crashes(seed: int, count: int) -> Tally:
    """The same over the simulated node."""
    return check_crashes(seed, count, on=SimulatedMig)
