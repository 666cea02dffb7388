"""Layout transitions: the partitioner's plans executed on a model and compared with brute force.

Every check takes a seed and a count and returns a Tally; the tests run few
cases of each, the benchmark runs all. A case that fails says how to get it
again.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from bench.fault_world import Tally
from bench.naive_partitioner import Graph, Instance, State, fewest, fits, maximal, moves
from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout, build_layout, read_layout
from eelgrid_agent.enforce.mig.partitioner import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstance,
    DestroyGpuInstance,
    MigStep,
    SetMigMode,
    TransitionRefused,
    plan_steps,
)
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance

__all__ = [
    "CHECKS",
    "base_graph",
    "check_maximal",
    "check_sampled",
    "check_whole",
    "follow",
    "gpu_of",
    "judge",
    "layout_from",
    "random_state",
]

_BASE = ("1g", "2g", "3g", "4g", "7g")
_CALLS_MOST = 6


def gpu_of(geometry: MigGeometry, instances: Iterable[Instance], *, mig_enabled: bool = True, **changes: object) -> Gpu:
    """A device on which these instances stand, with the driver's ids."""
    held = []
    for profile_id, start, compute in sorted(instances, key=lambda instance: instance[1]):
        profile = geometry.profile_by_id(profile_id)
        assert profile is not None
        number = geometry.gi_id(start, profile.size)
        children = (ComputeInstance(id=index, profile_id=ci) for index, ci in enumerate(compute))
        held.append(
            GpuInstance(
                id=number,
                profile_id=profile_id,
                profile=profile.name,
                start=start,
                size=profile.size,
                compute_instances=tuple(children),
            )
        )
    gpu = Gpu(uuid="GPU-0", index=0, product="simulated", model="simulated", mig_capable=True, mig_enabled=mig_enabled)
    return replace(gpu, gpu_instances=tuple(sorted(held, key=lambda instance: instance.id)), **changes)


def layout_from(geometry: MigGeometry, instances: Iterable[Instance], *, mig_enabled: bool = True) -> MigLayout:
    """The same as something wanted."""
    return read_layout(gpu_of(geometry, instances, mig_enabled=mig_enabled))


def follow(geometry: MigGeometry, gpu: Gpu, steps: Iterable[MigStep], spared: frozenset[int] = frozenset()) -> Gpu:
    """The device after these steps; an AssertionError where a driver would refuse one, or where one touches `spared`."""
    for step in steps:
        held = {instance.id: instance for instance in gpu.gpu_instances}
        mode = gpu.mig_enabled
        match step:
            case SetMigMode(enabled=mode):
                assert not held, "mode change with instances"
            case DestroyComputeInstance(instance_id=number, compute_id=child):
                assert number not in spared, "touches what it may not"
                left = tuple(ci for ci in held[number].compute_instances if ci.id != child)
                assert len(left) < len(held[number].compute_instances), "destroys what is not there"
                held[number] = replace(held[number], compute_instances=left)
            case DestroyGpuInstance(instance_id=number):
                assert number not in spared, "touches what it may not"
                assert not held.pop(number).compute_instances, "destroys an instance with compute instances"
            case CreateGpuInstance(profile_id=profile_id, start=start):
                assert mode, "creates with MIG off"
                (made,) = gpu_of(geometry, [(profile_id, start, ())]).gpu_instances
                held[made.id] = made
                everything = frozenset((gi.profile_id, gi.start, ()) for gi in held.values())
                assert len(held) > len(gpu.gpu_instances), "the place is taken"
                assert fits(geometry, everything), "no room"
            case CreateComputeInstance(start=start, profile_id=profile_id):
                number = next(gi.id for gi in held.values() if gi.start == start)
                assert number not in spared, "touches what it may not"
                held[number] = _with_compute(geometry, held[number], profile_id)
        instances = tuple(sorted(held.values(), key=lambda instance: instance.id))
        gpu = replace(gpu, mig_enabled=mode, mig_pending=False, gpu_instances=instances)
    return gpu


def _with_compute(geometry: MigGeometry, instance: GpuInstance, profile_id: int) -> GpuInstance:
    profile = geometry.profile_by_id(instance.profile_id)
    assert profile is not None
    slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
    taken = {child.id for child in instance.compute_instances}
    number = next(index for index in range(len(taken) + 1) if index not in taken)
    children = (*instance.compute_instances, ComputeInstance(id=number, profile_id=profile_id))
    assert sum(slices[child.profile_id] for child in children) <= profile.compute_slices, "no compute slices left"
    return replace(instance, compute_instances=tuple(sorted(children, key=lambda child: child.id)))


def judge(
    geometry: MigGeometry,
    gpu: Gpu,
    wanted: MigLayout,
    *,
    busy: frozenset[int],
    foreign: frozenset[int],
    shortest: Callable[[MigLayout], int | None],
) -> str:
    """What is wrong with the plan for this case, or nothing.

    `shortest` is the twin: the fewest calls to a layout of the whole device, None where there is no way.
    """
    places = {part.place for part in wanted.parts}
    beside = [part for part, gi in zip(read_layout(gpu).parts, _by_start(gpu), strict=True) if gi.id in foreign]
    goal = build_layout(wanted.mig_enabled, (*wanted.parts, *(part for part in beside if part.place not in places)))
    try:
        steps = plan_steps(geometry, gpu, wanted, busy=busy, foreign=foreign)
    except TransitionRefused as refused:
        if refused.rule not in (RefusalRule.BUSY, RefusalRule.FOREIGN):
            return f"refused as {refused}"
        fewest_calls = shortest(goal)
        return "" if fewest_calls is None else f"refused as {refused}, and {fewest_calls} calls would do"
    try:
        after = follow(geometry, gpu, steps, busy | foreign)
    except AssertionError as error:
        return f"{error} in {[step.describe() for step in steps]}"
    if read_layout(after) != goal:
        return f"ends at {read_layout(after)}"
    fewest_calls = shortest(goal)
    return "" if fewest_calls == len(steps) else f"{len(steps)} steps where {fewest_calls} do"


def _by_start(gpu: Gpu) -> list[GpuInstance]:
    return sorted(gpu.gpu_instances, key=lambda instance: (instance.start, instance.profile_id))


@cache
def base_graph(part: str = "a100-40gb") -> tuple[MigGeometry, Graph]:
    """A part with the profiles that have neither media engines nor double memory, and all its states."""
    geometry = load_catalogue().geometries[part]
    profiles = {key: profile for key, profile in geometry.profiles.items() if key in _BASE}
    plain = replace(geometry, profiles=profiles)
    return plain, Graph(plain)


def check_maximal(seed: int, count: int = 19) -> Tally:
    """Maximal layouts of an A100 to all 19 of them."""
    _, graph = base_graph()
    every = maximal(graph.layouts)
    return _between(seed, [every[(seed + index) % len(every)] for index in range(count)], every)


def check_whole(seed: int, count: int = 298) -> Tally:
    """Layouts of an A100's plain profiles, `count` of them from the seed on, to all 298."""
    _, graph = base_graph()
    every = list(graph.layouts)
    return _between(seed, [every[(seed + index) % len(every)] for index in range(count)], every)


def _between(seed: int, sources: list[frozenset[tuple[int, int]]], targets: list[frozenset[tuple[int, int]]]) -> Tally:
    """Each source to each target, with nothing in use and with a random part in use."""
    geometry, graph = base_graph()
    tally = Tally()
    goals = [(layout_from(geometry, graph.full(target)), graph.full(target)) for target in targets]
    numbers = {layout: graph.number(instances) for layout, instances in goals}
    for index, source in enumerate(sources):
        gpu = gpu_of(geometry, graph.full(source))
        chance = random.Random(seed + index)
        in_use = frozenset(gi for gi in gpu.gpu_instances if chance.random() < 0.4)
        for held in dict.fromkeys((frozenset(), in_use)):
            busy = frozenset(gi.id for gi in held)
            distances = graph.distances(graph.full(source), ((gi.profile_id, gi.start) for gi in held))
            for wanted, _ in goals:
                problem = judge(
                    geometry,
                    gpu,
                    wanted,
                    busy=busy,
                    foreign=frozenset(),
                    shortest=lambda goal, known=distances: known.get(numbers[goal]),
                )
                tally.count(problem and f"from {sorted(source)} with {sorted(busy)} in use to {wanted}: {problem}")
    return tally


def check_sampled(seed: int, count: int) -> Tally:
    """Random layouts of every part and profile, compute instances cut up, some in use and some foreign.

    The layout wanted is a few random calls away, so that the twin can search without end.
    """
    parts = list(load_catalogue().geometries.values())
    tally = Tally()
    for number in range(seed, seed + count):
        chance = random.Random(number)
        geometry = parts[number % len(parts)]
        start = random_state(geometry, chance, chance.randrange(2, 14))
        goal = start
        for _ in range(chance.randrange(_CALLS_MOST)):
            goal = chance.choice(list(moves(geometry, goal, frozenset())))
        problem = _judge_sample(geometry, start, goal, chance)
        tally.count(problem and f"seed {number}, {geometry.key}, {start} to {goal}: {problem}")
    return tally


def random_state(geometry: MigGeometry, chance: random.Random, calls: int) -> State:
    """What a device may come to after so many calls."""
    state = State(True, frozenset())
    for _ in range(calls):
        following = list(moves(geometry, state, frozenset()))
        # Building is likelier than tearing down, else nothing much ever stands.
        larger = [after for after in following if sum(len(i[2]) + 1 for i in after.instances) > _weight(state)]
        state = chance.choice(larger if larger and chance.random() < 0.8 else following)
    return state


def _weight(state: State) -> int:
    return sum(len(instance[2]) + 1 for instance in state.instances)


def _judge_sample(geometry: MigGeometry, start: State, goal: State, chance: random.Random) -> str:
    gpu = gpu_of(geometry, start.instances, mig_enabled=start.mig_enabled)
    busy = frozenset(gi.id for gi in gpu.gpu_instances if chance.random() < 0.15)
    foreign = frozenset(gi.id for gi in gpu.gpu_instances if chance.random() < 0.1)
    untouchable = frozenset(
        _instance(part)
        for part, gi in zip(read_layout(gpu).parts, _by_start(gpu), strict=True)
        if gi.id in busy | foreign
    )
    # Read back, compute instances are largest first; the twin sorts them the other way.
    wanted = layout_from(geometry, goal.instances, mig_enabled=goal.mig_enabled)

    def shortest(layout: MigLayout) -> int | None:
        instances = frozenset(map(_instance, layout.parts))
        if not fits(geometry, instances) or (instances and not layout.mig_enabled):
            return None
        after = State(layout.mig_enabled, instances)
        begin = State(start.mig_enabled, frozenset(map(_instance, read_layout(gpu).parts)))
        return fewest(geometry, begin, after, untouchable, 2 * _CALLS_MOST)

    return judge(geometry, gpu, wanted, busy=busy, foreign=foreign, shortest=shortest)


def _instance(part: InstancePart) -> Instance:
    return part.profile_id, part.start, tuple(sorted(part.compute))


CHECKS: dict[str, Callable[[int, int], Tally]] = {
    "maximal layouts": check_maximal,
    "every layout": check_whole,
    "sampled on every part": check_sampled,
}
