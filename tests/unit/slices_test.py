"""Slices in the daemon: who may be placed where, what is planned, and what the journal brings back."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_request
from tests.builders.partition import (
    POOL,
    apply_layout,
    apply_plans,
    build_mig_node,
    build_partitioned_core,
    build_planned_node,
    build_slice_points,
    build_sliced_service,
    carry_out_partitions,
    list_seats,
    search_partitions,
    set_partition_policy,
)
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.partition.problem import FleetTooSmall, InvalidProblem, UnservableService
from eelgrid_controller.partition.recommendation import PartitionsRefused
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import PartitionsPlanned, WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_kernels.node_cost import GPU_PARTITIONED, GPU_PLACEABLE
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    BudgetScope,
    EnforcementMode,
    GpuLayout,
    LatencyMetric,
    LatencyObjective,
    Placement,
    PoolMode,
    PowerBudget,
    ServicePromise,
    WantedInstance,
    WorkloadPhase,
)


def alike(core: Core) -> None:
    """The state is sound, and comes back from a checkpoint as JSON."""
    check_invariants(core.state)
    back = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    check_invariants(back)
    assert back.digest() == core.state.digest()
    assert {name: record.partitioned for name, record in back.nodes.items()} == {
        name: record.partitioned for name, record in core.state.nodes.items()
    }


def states(core: Core, row: int = 0) -> list[int]:
    return core.snapshot().nodes.gpu_state[row].tolist()


def test_a_partitioned_pool_is_the_planners_from_the_moment_on():
    core = build_partitioned_core(build_mig_node("a"), partitioned=False)
    assert states(core) == [GPU_PLACEABLE] * 2
    set_partition_policy(core, now_ns=4)
    assert states(core) == [GPU_PARTITIONED] * 2
    waits = core.submit(build_request(gpus=1), now_ns=5).result
    assert (waits.phase, waits.reason.partition(":")[0]) == (WorkloadPhase.PENDING, "gpu_mig")
    placement = Placement(replica=0, node_name="a", gpu_uuids=("GPU-a-0",), gpu_indexes=(0,))
    with pytest.raises(ContradictoryEvent, match="partition planner's"):
        core.state.apply(WorkloadPlaced(time_ns=6, workload_id=waits.workload_id, placements=(placement,)))
    alike(core)
    set_partition_policy(core, partitioned=False, now_ns=7)
    assert core.retry(now_ns=8).result is None
    assert states(core) == [GPU_PLACEABLE] * 2


def test_a_service_with_slices_waits_for_a_plan_and_says_so():
    core = build_partitioned_core(build_mig_node("a"), partitioned=False)
    waits = core.submit(build_sliced_service("s", 20.0), now_ns=5).result
    assert (waits.phase, waits.reason) == (WorkloadPhase.PENDING, "partitions: waits for the partition planner")
    assert "--partition" in core.explain_workload("s").remedy
    set_partition_policy(core, now_ns=6)
    assert "eelctl partition plan" in core.explain_workload("s").remedy
    assert core.submit(build_sliced_service("s", 20.0), now_ns=7).events == ()
    assert core.submit(replace(build_sliced_service("t", 1.0), dry_run=True), now_ns=7).result.reason == waits.reason
    # The online engine passes it over, whatever room appears.
    core.register_node(build_mig_node("b", pool=""), now_ns=8)
    assert core.workload("s").phase is WorkloadPhase.PENDING
    assert core.cancel("s", now_ns=9).result.phase is WorkloadPhase.CANCELLED
    alike(core)


def test_a_plan_is_reported_made_and_named_in_the_node_plan():
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    before = core.state.digest()
    change = search_partitions(core)
    assert core.state.digest() == before, "asking changes nothing"
    (gpu,) = change.recommendation.gpus
    (told,) = change.recommendation.services
    assert (gpu.before.mig_enabled, gpu.after.mig_enabled, gpu.residents_before) == (False, True, ())
    assert told.after_hz >= told.rate_hz > told.before_hz == 0.0
    # What keeps a promise is less than what was measured with work always there.
    assert told.after_hz < 10.0 * sum(
        {"1g": 1, "2g": 2, "3g": 3, "4g": 4, "7g": 7}[one.slice.profile[:2]] for one in gpu.residents
    )
    (stage,) = change.stages
    epoch = core.node_plan("a").epoch
    step = core.apply_partitions(stage, now_ns=6)
    assert [type(event) for event in step.events] == [PartitionsPlanned]
    assert core.workload("s").phase is WorkloadPhase.PLACED
    plan = core.node_plan("a")
    # The layout is asked for; the replicas follow when their slices stand.
    assert (plan.epoch, plan.gpu_layouts, plan.assignments) == (epoch + 1, (gpu.after,), ())
    apply_plans(core, now_ns=7)
    plan = core.node_plan("a")
    assert plan.epoch == epoch + 2
    assert sorted(item.gpu_uuids[0] for item in plan.assignments) == sorted(
        f"MIG-{uuid}-{profile}-{start}" for uuid, profile, start in list_seats(core, "s")
    )
    assert {item.gpu_milli for item in plan.assignments} == {1000}
    assert core.state.nodes["a"].allocated_gpu_milli < 1000
    assert core.state.nodes["a"].allocated_cpu_milli == 1000 * len(plan.assignments)
    alike(core)
    # Nothing more is to be gained.
    assert search_partitions(core).stages == ()


def test_a_stage_that_exceeds_a_power_budget_is_refused_and_says_by_how_much():
    """A GPU with slices that are taken draws like one that is taken as a whole."""
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    (stage,) = search_partitions(core).stages
    idle_w, more_w = 2 * 49.7, 400.0 - 49.7
    for left_w, refused in ((more_w - 1.0, True), (more_w, False)):
        budget = PowerBudget(scope=BudgetScope.NODE, name="a", limit_w=idle_w + left_w)
        core.update_policy(replace(core.state.policy, budgets=(budget,)), now_ns=6)
        if refused:
            with pytest.raises(
                PartitionsRefused, match=r"node a has 349 of its 449 W left, and 350 W more would be drawn"
            ):
                core.apply_partitions(stage, now_ns=7)
            assert core.workload("s").phase is WorkloadPhase.PENDING
    core.apply_partitions(stage, now_ns=8)
    assert core.workload("s").phase is WorkloadPhase.PLACED


def test_work_on_a_gpu_of_a_new_partitioned_pool_stays_until_it_ends():
    core = build_partitioned_core(build_mig_node("a"), partitioned=False)
    job = core.submit(build_request(gpus=1, key="job"), now_ns=4).result.placements[0].gpu_uuids[0]
    set_partition_policy(core, now_ns=5)
    core.submit(build_sliced_service("s", 20.0), now_ns=6)
    change = carry_out_partitions(core)
    assert {uuid for uuid, _, _ in list_seats(core, "s")} == {"GPU-a-0", "GPU-a-1"} - {job}
    (held,) = [gpu for gpu in change.recommendation.gpus if gpu.held]
    assert held.held == "job runs on it"
    assert core.node_plan("a").assignments[0].gpu_uuids == (job,)
    alike(core)
    core.cancel("job", now_ns=11)
    core.submit(build_sliced_service("t", 60.0), now_ns=12)
    carry_out_partitions(core, now_ns=13)
    assert job in {uuid for uuid, _, _ in list_seats(core, "t") + list_seats(core, "s")}
    alike(core)


def test_a_cancelled_service_frees_its_slices_and_layouts_change_when_it_pays():
    core = build_partitioned_core(build_mig_node("a", gpus=2))
    for key in ("s", "t", "u"):
        core.submit(build_sliced_service(key, 20.0), now_ns=5)
    carry_out_partitions(core)
    layouts = core.node_plan("a").gpu_layouts
    core.cancel("t", now_ns=20)
    assert core.node_plan("a").gpu_layouts == layouts, "a layout is nobody's who leaves"
    assert {item.workload_id for item in core.node_plan("a").assignments} == {"s", "u"}
    alike(core)
    core.submit(build_sliced_service("v", 20.0), now_ns=21)
    change = carry_out_partitions(core, now_ns=22)
    # What stands is used again: a slice that fits costs a start alone.
    assert core.node_plan("a").gpu_layouts == layouts
    assert change.recommendation.cost <= 30.0 * change.recommendation.services[-1].replicas
    alike(core)


def test_new_replicas_stand_before_old_ones_go():
    """Slices that carry half as much are left for larger ones, which stand first."""
    core = build_partitioned_core(build_mig_node("a"), build_mig_node("b"))
    for key, rate_hz in (("s", 20.0), ("t", 5.0), ("u", 5.0)):
        core.submit(build_sliced_service(key, rate_hz), now_ns=5)
    carry_out_partitions(core)
    core.record_measurements(build_slice_points(scale=0.5), now_ns=11)
    before = {key: set(list_seats(core, key)) for key in "stu"}
    change = search_partitions(core)
    first, second = change.stages
    assert (first.drains, second.drains) == (False, True)
    core.apply_partitions(first, now_ns=12)
    now = {key: set(list_seats(core, key)) for key in "stu"}
    assert all(before[key] <= now[key] for key in "stu")
    assert any(before[key] < now[key] for key in "stu")
    apply_plans(core, now_ns=13)
    core.apply_partitions(second, now_ns=14)
    apply_plans(core, now_ns=15)
    for told in change.recommendation.services:
        assert told.after_hz >= told.rate_hz
        assert told.lowest_share == 1.0
        assert told.replicas == len(list_seats(core, told.workload_id))
    alike(core)
    assert search_partitions(core).stages == ()


def test_no_promise_is_broken_for_a_gain_alone():
    """Slices that carry twice as much could save a GPU, but the way there takes a service's only replica."""
    core = build_partitioned_core(build_mig_node("a"), build_mig_node("b"))
    core.record_measurements(build_slice_points(scale=0.5), now_ns=4)
    for key, rate_hz in (("s", 25.0), ("t", 25.0), ("u", 5.0)):
        core.submit(build_sliced_service(key, rate_hz), now_ns=5)
    carry_out_partitions(core)
    core.record_measurements(build_slice_points(), now_ns=11)
    change = search_partitions(core)
    assert (change.stages, change.recommendation.gain, change.recommendation.cost) == ((), 0.0, 0.0)
    # Who waits is worth it, and is told what it costs the others.
    core.submit(build_sliced_service("v", 20.0), now_ns=12)
    change = carry_out_partitions(core, now_ns=13)
    assert {told.workload_id for told in change.recommendation.services if told.after_hz >= told.rate_hz} == set("stuv")
    alike(core)


def test_a_service_that_was_measured_on_whole_gpus_has_them():
    core = build_partitioned_core(build_mig_node("a"))
    (whole,) = (one for one in build_slice_points("wide", scale=2.0) if one.mig_profile == "7g.40gb")
    core.record_measurements([replace(whole, mig_profile="")], now_ns=4)
    core.submit(build_sliced_service("s", 90.0, profile="wide"), now_ns=5)
    (stage,) = search_partitions(core).stages
    core.apply_partitions(stage, now_ns=6)
    # A GPU that was never cut is there at once.
    plan = core.node_plan("a")
    ((uuid, _, _),) = list_seats(core, "s")
    assert [item.gpu_uuids for item in plan.assignments] == [(uuid,)]
    assert [(layout.gpu_uuid, layout.mig_enabled) for layout in plan.gpu_layouts] == [(uuid, False)]
    assert core.state.nodes["a"].gpu_milli == {uuid: 1000}
    alike(core)
    core.cancel("s", now_ns=7)
    core.submit(build_sliced_service("t", 90.0), now_ns=8)
    carry_out_partitions(core, now_ns=9)
    assert len(list_seats(core, "t")) > 1
    alike(core)


def test_a_stage_that_no_longer_holds_changes_nothing():
    core = build_partitioned_core(build_mig_node("a", gpus=1), build_mig_node("b", gpus=1))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    (stage,) = search_partitions(core).stages
    name = stage.turns[0].seat.node_name

    def refused(words: str) -> None:
        before = core.state.digest()
        with pytest.raises(PartitionsRefused, match=words):
            core.apply_partitions(stage, now_ns=9)
        assert core.state.digest() == before

    core.mark_node_lost(name, now_ns=6)
    refused(f"node {name} is lost")
    cut = replace(
        build_mig_node(name, gpus=1),
        gpus=(
            apply_layout(
                build_mig_node(name).gpus[0],
                GpuLayout(
                    gpu_uuid=f"GPU-{name}-0", mig_enabled=True, instances=(WantedInstance(profile="1g.5gb", start=0),)
                ),
            ),
        ),
    )
    core.register_node(cut, now_ns=7)
    refused("cut by somebody else|given another layout since")
    core.register_node(build_mig_node(name, gpus=1, cpu=0), now_ns=8)
    refused("exceeds the CPU")
    core.register_node(build_mig_node(name, gpus=1), now_ns=9)
    core.apply_partitions(stage, now_ns=10)
    refused("has been given another layout since")
    core.cancel("s", now_ns=11)
    refused("has been given another layout since|is gone")
    set_partition_policy(core, partitioned=False, now_ns=12)
    refused("no longer managed by the partition planner")


def test_gpus_that_somebody_else_cut_are_left_alone_and_reported():
    cut = apply_layout(
        build_mig_node("a").gpus[0],
        GpuLayout(gpu_uuid="GPU-a-0", mig_enabled=True, instances=(WantedInstance(profile="3g.20gb", start=4),)),
    )
    core = build_partitioned_core(replace(build_mig_node("a"), gpus=(cut, build_mig_node("a").gpus[1])))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    change = carry_out_partitions(core)
    assert {uuid for uuid, _, _ in list_seats(core, "s")} == {"GPU-a-1"}
    assert "somebody else" in next(gpu for gpu in change.recommendation.gpus if gpu.gpu_index == 0).held


def test_replicas_on_a_lost_node_are_replaced_and_then_let_go():
    core = build_partitioned_core(build_mig_node("a", gpus=1), build_mig_node("b", gpus=1))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    carry_out_partitions(core)
    (lost,) = {place.node_name for place in core.workload("s").placements}
    core.mark_node_lost(lost, now_ns=11)
    carry_out_partitions(core, now_ns=12)
    assert lost not in {place.node_name for place in core.workload("s").placements}
    core.register_node(core.state.nodes[lost].inventory, now_ns=13)
    assert core.node_plan(lost).assignments == ()
    alike(core)


def test_what_cannot_be_served_is_named_and_the_others_are_planned():
    core = build_partitioned_core(build_mig_node("a", gpus=1))
    core.submit(build_sliced_service("s", 5.0), now_ns=5)
    core.submit(build_sliced_service("tight", 5.0, latency_s=0.001), now_ns=6)
    told = {one.workload_id: one for one in carry_out_partitions(core).recommendation.services}
    assert told["s"].replicas >= 1
    assert "the least measured is" in told["tight"].problem
    assert core.workload("tight").phase is WorkloadPhase.PENDING
    core.submit(build_sliced_service("large", 1000.0), now_ns=7)
    with pytest.raises(FleetTooSmall, match="A100"):
        search_partitions(core)
    core.cancel("large", now_ns=8)
    # A service that runs and can be served no more is told, and left where it is.
    core.record_measurements([replace(one, throughput_hz=0.1, latencies=()) for one in build_slice_points()], now_ns=11)
    with pytest.raises(UnservableService, match="service s"):
        search_partitions(core)


def test_more_replicas_than_a_service_may_have_are_no_plan():
    core = build_partitioned_core(build_mig_node("a", gpus=3))
    core.submit(build_sliced_service("few", 90.0, replicas_most=1), now_ns=5)
    with pytest.raises(InvalidProblem, match=r"few.*needs 2 replicas, of which it may have 1"):
        search_partitions(core)


def test_slices_are_neither_scaled_nor_limited_nor_moved():
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    carry_out_partitions(core)
    with pytest.raises(FailedPrecondition, match="eelctl partition plan"):
        core.scale("s", 3, now_ns=11)
    with pytest.raises(FailedPrecondition, match="whole GPUs"):
        core.set_limit("s", 200.0, now_ns=12)


def test_a_pool_that_is_taken_back_forgets_layouts_once_they_are_empty():
    core = build_partitioned_core(build_mig_node("a", gpus=2))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    carry_out_partitions(core)
    ((used, *_), *_) = list_seats(core, "s")
    set_partition_policy(core, partitioned=False, now_ns=11)
    assert [layout.gpu_uuid for layout in core.node_plan("a").gpu_layouts] == [used]
    assert search_partitions(core).recommendation.gpus_ready == 0 if not core.state.live_workloads else True
    core.cancel("s", now_ns=12)
    assert core.node_plan("a").gpu_layouts == ()
    alike(core)


def test_agents_are_asked_again_by_a_new_epoch():
    core = build_partitioned_core(build_mig_node("a", gpus=1))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    (stage,) = search_partitions(core).stages
    core.apply_partitions(stage, now_ns=6)
    epoch = core.node_plan("a").epoch
    seats_ = [turn.seat for turn in stage.turns]
    core.apply_partitions(seats_, now_ns=7)
    assert core.node_plan("a").epoch == epoch + 1
    apply_plans(core, now_ns=8)
    with pytest.raises(PartitionsRefused, match="have their layouts already"):
        core.apply_partitions(seats_, now_ns=9)
    # The same inventory again is no news.
    epoch = core.node_plan("a").epoch
    core.register_node(replace(build_planned_node(core, core.state.nodes["a"]), generation=2), now_ns=10)
    assert core.node_plan("a").epoch == epoch


def test_the_events_come_back_from_the_journal():
    core = build_partitioned_core(build_mig_node("a"), build_mig_node("b"))
    twin = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    events = []
    for number, (key, rate_hz) in enumerate((("s", 20.0), ("t", 35.0), ("u", 12.0))):
        events += core.submit(build_sliced_service(key, rate_hz), now_ns=20 + number).events
        for stage in search_partitions(core).stages:
            events += core.apply_partitions(stage, now_ns=30 + number).events
    events += core.cancel("t", now_ns=40).events
    for one in events:
        kind, body = event_to_plain(one)
        twin.apply(event_from_plain(kind, json.loads(json.dumps(body))))
    assert twin.digest() == core.state.digest()
    check_invariants(twin)


def test_promises_with_slices_are_of_responses_and_one_gpu():
    tokens = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.1)
    fields = {"profile": "p", "objectives": (tokens,), "output_tokens": 5.0, "slices": True}
    assert [one.field for one in ServicePromise(**fields).violations()] == ["slices"]
    assert [
        one.field for one in replace(build_sliced_service("s", 1.0).spec.service, replicas_least=2).violations()
    ] == ["replicas_least"]
    spec = build_sliced_service("s", 1.0).spec
    two = replace(spec, request=replace(spec.request, gpu_count=2))
    assert [one.field for one in two.violations()] == ["request.gpu_count"]
    assert PoolMode(pool=POOL, mode=EnforcementMode.OBSERVE, partitioned=True).partitioned
