"""How long others take to make room for a service is learned, and the service is planned that much further ahead."""

import math

import pytest
from tests.builders.objectives import build_service, run_objectives
from tests.unit.objectives_services_test import ready, rounds, standing

from eelgrid_controller.objectives.service_observer import RoomTimes
from eelgrid_controller.objectives.services.autoscaler import LoadObserved, ReplicaScaler, ReplicasReady, ScalingLimits
from eelgrid_controller.state.events import PreemptionStarted, WorkloadCancelled, WorkloadScaled
from eelgrid_protos.messages import Placement

S = 10**9


def started(at_s, *replicas, name="s"):
    places = tuple(Placement(replica=one, node_name="n1") for one in replicas)
    return PreemptionStarted(
        time_ns=int(at_s * S), workload_id=name, placements=places, victims=("v",), reason="r", waits="w"
    )


def scaled(at_s, *replicas, name="s", released=()):
    places = tuple(Placement(replica=one, node_name="n1") for one in replicas)
    return WorkloadScaled(time_ns=int(at_s * S), workload_id=name, placements=places, released=released)


def learn(*events):
    times = RoomTimes()
    for event in events:
        times.observe(event)
    return times.list_times_s()


def test_the_longest_of_the_last_growths_counts_rounded_up():
    assert learn() == {}
    assert learn(scaled(5, 1)) == {}
    assert learn(started(0, 1), scaled(33, 1)) == {"s": 40.0}
    assert learn(started(0, 1), scaled(33, 1), started(40, 2), scaled(47, 2)) == {"s": 40.0}
    assert learn(started(0, 1), scaled(9999, 1)) == {"s": 640.0}
    # Where there was room of late nothing has to be waited for.
    assert learn(started(0, 1), scaled(33, 1), *(scaled(50 + n, 2 + n) for n in range(4))) == {}


def test_what_comes_beside_or_never_comes_is_no_time():
    # One more that was free, while others still make room; then those come.
    assert learn(started(0, 1), scaled(10, 2)) == {}
    assert learn(started(0, 1), scaled(10, 2), scaled(30, 1)) == {"s": 40.0}
    assert learn(started(0, 1), scaled(10, released=(0,)), scaled(500, 3)) == {}
    assert learn(started(0, 1), WorkloadCancelled(time_ns=5 * S, workload_id="s"), scaled(99, 1)) == {}


async def test_a_service_is_planned_so_much_further_ahead():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        await rounds(world, 3, 5.0)
        start_s = world.workload("s").spec.service.start_s
        assert f"in {start_s:g} s need" in standing(world).reason
        world.control_loop._room.observe(started(0, 7))
        world.control_loop._room.observe(scaled(75, 7))
        await rounds(world, 2, 5.0)
        assert f"in {start_s + 80.0:g} s need" in standing(world).reason


@pytest.mark.parametrize("room_s", [120.0, 240.0])
def test_replicas_of_a_rising_load_come_in_time_once_the_wait_is_known(room_s):
    """A rate that doubles in an hour; replicas serve a start of 60 s after they have room."""

    def count_short(known_s):
        limits = ScalingLimits(least=1, most=100, start_s=60.0 + known_s)
        scaler = ReplicaScaler(limits, lambda hz: max(1, math.ceil(hz / 10.0)))
        state = scaler.initial_state(10)
        ordered, short = [(0.0, 10)], 0
        for n in range(240):
            at_s, hz = 15.0 * n, 80.0 * 2.0 ** (15.0 * n / 3600.0)
            state, decision = scaler.scale_replicas(state, LoadObserved(at_s, hz))
            if decision.replicas != ordered[-1][1]:
                ordered.append((at_s, decision.replicas))
            serving = max((count for when_s, count in ordered if when_s + 60.0 + room_s <= at_s), default=10)
            state, _ = scaler.scale_replicas(state, ReplicasReady(at_s, serving))
            short += serving < math.ceil(hz / 10.0)
        return short

    assert count_short(room_s) < count_short(0.0) / 2
