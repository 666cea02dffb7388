"""Scaling, limits and points: what the core does, what it refuses, and what the journal brings back."""

import json
import time
from dataclasses import replace

import pytest
from tests.builders.cluster import GIB, build_core, build_node, build_request, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    WorkloadLimited,
    WorkloadPlaced,
    WorkloadScaled,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.measurement_events import PointsMeasured
from eelgrid_controller.state.measurements import MeasuredPoints
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    MeasuredPoint,
    Placement,
    QuantileLatency,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)


def service(**changes) -> ServicePromise:
    objective = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0)
    return ServicePromise(**({"profile": "chat", "objectives": (objective,), "replicas_most": 6} | changes))


def serving(core: Core, replicas: int = 2, gpus: int = 1, **changes) -> Core:
    asked = build_request(gpus=gpus, key="s", replicas=replicas, kind=WorkloadKind.INFERENCE_SERVICE, service=service())
    core.submit(replace(asked, spec=replace(asked.spec, **changes)), now_ns=5)
    return core


def places(core: Core) -> list[tuple[int, str]]:
    return [(item.replica, item.node_name) for item in core.workload("s").placements]


def alike(core: Core) -> None:
    """The state is sound, and comes back from a checkpoint as JSON."""
    check_invariants(core.state)
    plain = json.loads(json.dumps(core.state.dump()))
    assert ClusterState.load(plain).digest() == core.state.digest()


def test_more_replicas_are_placed_and_the_others_stand_where_they_stood():
    core = serving(build_core(build_node("a", gpus=4), build_node("b", gpus=4)))
    before = core.workload("s").placements
    step = core.scale("s", 4, now_ns=6)
    (event,) = drop_quotes(step.events)
    assert isinstance(event, WorkloadScaled)
    assert (event.released, [item.replica for item in event.placements]) == ((), [2, 3])
    assert step.result.placements[:2] == before
    assert (step.result.spec.replicas, step.result.replicas_begun) == (4, 2)
    assert step.nodes == {item.node_name for item in event.placements}
    assert {item.replica for item in core.explain_workload("s").replicas} == {0, 1, 2, 3}
    alike(core)


def test_fewer_replicas_empty_the_gpus_and_packages_that_cost_most():
    core = build_core(build_node("a", gpus=2, model="T4"), build_node("b", gpus=2, model="G2"))
    serving(core, replicas=4)
    before_w = core.modelled_power_w()
    step = core.scale("s", 2, now_ns=6)
    # A G2 goes from 150 W to 30 W, a T4 from 70 W to 10 W.
    assert {name for _, name in places(core)} == {"a"}
    assert before_w - core.modelled_power_w() == pytest.approx(2 * 120.0 + 105.0)
    assert step.nodes == {"b"}
    alike(core)


def test_freed_capacity_goes_to_what_waits():
    core = serving(build_core(build_node("a", gpus=2)))
    core.submit(build_request(gpus=1, key="waits"), now_ns=6)
    assert core.workload("waits").phase is WorkloadPhase.PENDING
    step = core.scale("s", 1, now_ns=7)
    assert [type(event) for event in drop_quotes(step.events)] == [WorkloadScaled, WorkloadPlaced]
    assert core.workload("waits").phase is WorkloadPhase.PLACED
    alike(core)


def test_as_many_as_there_is_room_for_and_nothing_twice():
    core = serving(build_core(build_node("a", gpus=4)))
    assert core.scale("s", 6, now_ns=6).result.spec.replicas == 4
    assert core.scale("s", 6, now_ns=7).events == ()
    assert core.scale("s", 4, now_ns=8).events == ()


def test_replicas_on_a_lost_node_count_for_nothing_and_go_when_others_stand():
    core = serving(build_core(build_node("a", gpus=1), build_node("b", gpus=1), build_node("c", gpus=1)))
    lost = core.workload("s").placements[0].node_name
    core.mark_node_lost(lost, now_ns=6)
    core.scale("s", 2, now_ns=7)
    assert len(core.workload("s").placements) == 2
    assert lost not in {name for _, name in places(core)}
    core.register_node(build_node(lost, gpus=1), now_ns=8)
    assert core.node_plan(lost).assignments == ()
    alike(core)


def test_replicas_on_a_lost_node_stay_while_nothing_stands_for_them():
    core = serving(build_core(build_node("a", gpus=1), build_node("b", gpus=1)))
    core.mark_node_lost("a", now_ns=6)
    assert core.scale("s", 2, now_ns=7).events == ()
    assert len(core.workload("s").placements) == 2


def test_replicas_on_a_lost_node_go_where_there_would_be_more_than_promised():
    core = build_core(build_node("a", gpus=4))
    asked = build_request(
        gpus=1, key="s", replicas=4, kind=WorkloadKind.INFERENCE_SERVICE, service=service(replicas_most=4)
    )
    core.submit(asked, now_ns=5)
    core.mark_node_lost("a", now_ns=6)
    core.register_node(build_node("b", gpus=1), now_ns=7)
    step = core.scale("s", 4, now_ns=8)
    assert (len(step.result.placements), step.result.spec.replicas) == (4, 4)
    assert tuple(step.result.spec.violations()) == ()
    alike(core)


def test_a_lost_gpu_counts_for_nothing():
    core = serving(build_core(build_node("a", gpus=3)), replicas=1)
    held = core.workload("s").placements[0].gpu_uuids[0]
    core.mark_gpu_lost("a", held, now_ns=6)
    core.scale("s", 1, now_ns=7)
    assert held not in core.workload("s").placements[0].gpu_uuids


def test_a_gpu_that_left_the_inventory_counts_for_nothing():
    core = serving(build_core(build_node("a", gpus=3)), replicas=2)
    gone = core.workload("s").placements[0].gpu_uuids[0]
    smaller = build_node("a", gpus=3)
    core.register_node(replace(smaller, gpus=tuple(gpu for gpu in smaller.gpus if gpu.uuid != gone)), now_ns=6)
    core.scale("s", 1, now_ns=7)
    assert [item.gpu_uuids == (gone,) for item in core.workload("s").placements] == [False]


@pytest.mark.parametrize("replicas", [0, 7])
def test_a_number_outside_of_the_promise_is_refused(replicas):
    core = serving(build_core(build_node("a", gpus=8)))
    with pytest.raises(InvalidArgument) as caught:
        core.scale("s", replicas, now_ns=6)
    assert caught.value.violations[0].field == "replicas"
    assert "1 to 6" in caught.value.violations[0].problem


def job(core: Core, replicas: int, **elastic) -> Core:
    promise = TrainingPromise(slowdown_most=0.05, **elastic)
    asked = build_request(gpus=1, key="s", replicas=replicas, kind=WorkloadKind.TRAINING_JOB)
    core.submit(replace(asked, spec=replace(asked.spec, training=promise)), now_ns=5)
    return core


def test_the_first_worker_of_a_job_stays():
    core = build_core(build_node("a", gpus=1, model="G2"), build_node("b", gpus=4, model="T4"))
    job(core, 5, replicas_least=1, replicas_most=8, profile="p")
    (first,) = [item for item in core.workload("s").placements if item.replica == 0]
    core.scale("s", 1, now_ns=6)
    assert core.workload("s").placements == (first,)


def test_a_gang_that_is_not_elastic_keeps_its_size():
    core = job(build_core(build_node("a", gpus=4)), 2)
    with pytest.raises(InvalidArgument, match="promised otherwise"):
        core.scale("s", 3, now_ns=6)
    assert core.scale("s", 2, now_ns=6).events == ()


def test_what_does_not_run_is_not_scaled():
    core = serving(build_core(build_node("a", gpus=2)))
    core.submit(build_request(gpus=2, key="waits"), now_ns=6)
    with pytest.raises(FailedPrecondition, match="does not run"):
        core.scale("waits", 2, now_ns=7)
    with pytest.raises(NotFound):
        core.scale("nobody", 2, now_ns=7)


def test_a_repeated_submission_of_a_scaled_service_is_harmless():
    core = build_core(build_node("a", gpus=4))
    asked = build_request(gpus=1, key="s", replicas=2, kind=WorkloadKind.INFERENCE_SERVICE, service=service())
    core.submit(asked, now_ns=5)
    core.scale("s", 3, now_ns=6)
    core.scale("s", 4, now_ns=7)
    assert core.submit(asked, now_ns=8).events == ()


@pytest.mark.parametrize(
    "event",
    [
        WorkloadScaled(time_ns=9, workload_id="nobody"),
        WorkloadScaled(time_ns=9, workload_id="s", released=(5,)),
        WorkloadScaled(time_ns=9, workload_id="s", released=(0, 1)),
        WorkloadScaled(time_ns=9, workload_id="s", released=(0, 0)),
        WorkloadScaled(time_ns=9, workload_id="s", placements=(Placement(replica=1, node_name="a"),)),
        WorkloadScaled(time_ns=9, workload_id="s", placements=(Placement(replica=7, node_name="nowhere"),)),
        WorkloadLimited(time_ns=9, workload_id="nobody", power_limit_w=200.0),
    ],
)
def test_events_that_contradict_the_state_change_nothing(event):
    core = serving(build_core(build_node("a", gpus=4)))
    before = core.state.digest()
    with pytest.raises(ContradictoryEvent):
        core.state.apply(event)
    assert core.state.digest() == before


def test_a_limit_is_in_the_plan_of_every_node_of_the_workload_until_it_ends():
    core = serving(build_core(build_node("a", gpus=1), build_node("b", gpus=1)))
    epochs = {name: core.node_plan(name).epoch for name in "ab"}
    step = core.set_limit("s", 200.0, now_ns=6)
    assert [type(event) for event in step.events] == [WorkloadLimited]
    assert step.nodes == {"a", "b"}
    for name in "ab":
        plan = core.node_plan(name)
        assert [(item.gpu_uuid, item.power_limit_w) for item in plan.gpu_settings] == [(f"GPU-{name}-0", 200.0)]
        assert plan.epoch == epochs[name] + 1
    assert core.set_limit("s", 200.0, now_ns=7).events == ()
    alike(core)
    core.set_limit("s", None, now_ns=8)
    assert core.node_plan("a").gpu_settings == ()
    core.set_limit("s", 150.0, now_ns=9)
    core.cancel("s", now_ns=10)
    assert core.node_plan("a").gpu_settings == ()


def test_new_replicas_have_the_limit_of_the_others():
    core = serving(build_core(build_node("a", gpus=4)))
    core.set_limit("s", 200.0, now_ns=6)
    core.scale("s", 3, now_ns=7)
    assert {item.power_limit_w for item in core.node_plan("a").gpu_settings} == {200.0}
    assert len(core.node_plan("a").gpu_settings) == 3


def test_shares_of_a_gpu_have_no_limit_of_their_own():
    core = build_core(build_node("a", gpus=1))
    core.submit(build_request(gpus=1, milli=500, key="half"), now_ns=5)
    with pytest.raises(FailedPrecondition, match="whole GPUs"):
        core.set_limit("half", 200.0, now_ns=6)


def point(batch: int = 1, **changes) -> MeasuredPoint:
    fields = {"profile": "chat", "gpu_model": "A100-SXM4-80GB", "throughput_hz": 10.0, "batch": batch}
    return MeasuredPoint(**(fields | changes))


def test_points_are_kept_the_newest_of_each_configuration():
    core = build_core(build_node("a"))
    step = core.record_measurements([point(1), point(2), point(1, throughput_hz=11.0)], now_ns=6)
    assert [type(event) for event in step.events] == [PointsMeasured]
    assert step.result == 2
    assert core.record_measurements([point(2)], now_ns=7).events == ()
    assert [one.throughput_hz for one in core.state.points["chat"]] == [11.0, 10.0]
    latencies = (QuantileLatency(quantile=0.5, latency_s=0.1), QuantileLatency(quantile=0.99, latency_s=0.3))
    core.record_measurements([point(2, latencies=latencies, power_w=300.0, power_limit_w=250.0)], now_ns=8)
    limited = core.state.points["chat"][2]
    assert (limited.latency_s, limited.power_w, limited.configuration.power_limit_w) == (
        {0.5: 0.1, 0.99: 0.3},
        300.0,
        250.0,
    )
    alike(core)


def test_a_copy_of_points_goes_on_apart():
    points = MeasuredPoints([point(1)])
    twin = points.copy()
    twin.add_points([point(2)])
    assert (points._count, twin._count, len(points["chat"])) == (1, 2, 1)


def test_points_have_a_limit():
    core = build_core(build_node("a"))
    core.state.points = MeasuredPoints(most=3)
    core.record_measurements([point(batch) for batch in (1, 2, 3)], now_ns=6)
    with pytest.raises(ResourceExhausted, match="3 points"):
        core.record_measurements([point(4)], now_ns=7)
    assert core.record_measurements([point(3, throughput_hz=5.0)], now_ns=8).result == 1


def test_the_events_come_back_from_the_journal():
    core = serving(build_core(build_node("a", gpus=4)))
    twin = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    steps = [
        core.scale("s", 4, now_ns=6),
        core.set_limit("s", 200.0, now_ns=7),
        core.record_measurements([point()], now_ns=8),
        core.scale("s", 1, now_ns=9),
        core.set_limit("s", None, now_ns=10),
    ]
    for event in (event for step in steps for event in step.events):
        kind, body = event_to_plain(event)
        twin.apply(event_from_plain(kind, json.loads(json.dumps(body))))
    assert twin.digest() == core.state.digest()
    assert core.state.nodes["a"].allocated_memory_bytes == GIB


def test_points_that_were_copied_change_apart():
    first, second = (MeasuredPoint(profile=name, gpu_model="A", throughput_hz=1.0) for name in ("p", "q"))
    known = MeasuredPoints([first])
    twin = known.copy()
    assert (dict(twin), twin._count) == (dict(known), 1)
    twin.add_points([replace(first, throughput_hz=2.0), second])
    twin.forget_profile("q")
    known.add_points([second])
    assert [point.throughput_hz for point in known["p"]] == [1.0]
    assert [point.throughput_hz for point in twin["p"]] == [2.0]
    assert (set(known), known._count, set(twin), twin._count) == ({"p", "q"}, 2, {"p"}, 1)
    twin.forget_profile("never there")
    assert MeasuredPoints.load(twin.dump()).dump() == twin.dump()


def test_scaling_down_from_thousands_takes_no_time_that_others_would_notice():
    core = build_core(*(build_node(f"n{number}") for number in range(3)))
    asked = build_request(gpus=0, key="many", replicas=4000)
    core.submit(replace(asked, spec=replace(asked.spec, request=ResourceRequest(cpu_milli=1))), now_ns=10)
    began_s = time.process_time()
    left = core.scale("many", 1, now_ns=11).result
    assert len(left.placements) == 1
    assert time.process_time() - began_s < 20.0, "every replica was weighed anew for each that went: hours"
