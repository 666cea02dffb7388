"""What others hold: less is left, nothing comes where a node is closed, and traits decide who may go where."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.migration_planner import build_migration_problem
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import NodeOccupied, event_to_plain
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory
from eelgrid_controller.whatif.decision_record import record_decision, replay_decision
from eelgrid_kernels.move_search import STAYS
from eelgrid_protos import catalogue
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import DeviceLease, RecommendMovesRequest, WorkloadPhase


def nodes_of(core: Core, key: str) -> list[str]:
    return [placement.node_name for placement in core.workload(key).placements]


def test_what_others_hold_is_not_given_away():
    core = build_core(build_node("a", gpus=4, cpu=16))
    core.update_external_usage("a", ExternalUsage(cpu_milli=10_000, gpu_count=3), now_ns=2)
    core.submit(build_request(gpus=2, key="two"), now_ns=3)
    assert core.workload("two").reason.startswith("gpu_count:")
    core.submit(build_request(gpus=0, cpu=7, key="seven"), now_ns=4)
    assert core.workload("seven").reason.startswith("cpu:")
    core.submit(build_request(gpus=1, key="one"), now_ns=5)
    (placement,) = core.workload("one").placements
    # Nobody knows which are held: those of the highest indexes are taken for it.
    assert placement.gpu_indexes == (0,)


def test_work_begins_when_others_go():
    core = build_core(build_node("a", gpus=2))
    core.update_external_usage("a", ExternalUsage(gpu_count=2), now_ns=2)
    core.submit(build_request(gpus=2, key="w"), now_ns=3)
    assert core.workload("w").phase is WorkloadPhase.PENDING
    step = core.update_external_usage("a", ExternalUsage(), now_ns=4)
    assert isinstance(drop_quotes(step.events)[0], NodeOccupied)
    assert core.workload("w").phase is WorkloadPhase.PLACED


def leased(node, index, *engines):
    """The node's report that engines have leased one of its GPUs; by nobody it is free."""
    leases = tuple(DeviceLease(device_uuid=node.gpus[index].uuid, engine=one, owner="12") for one in engines)
    gpus = tuple(replace(gpu, leases=leases) if gpu.index == index else gpu for gpu in node.gpus)
    return replace(node, gpus=gpus)


def test_a_gpu_that_another_engine_leased_gets_no_work_until_it_is_given_back():
    node = build_node("a", gpus=2)
    core = build_core(leased(node, 0, "slurm"))
    core.submit(build_request(gpus=1, key="first"), now_ns=2)
    core.submit(build_request(gpus=1, key="second"), now_ns=3)
    assert core.workload("first").placements[0].gpu_indexes == (1,)
    assert core.workload("second").phase is WorkloadPhase.PENDING
    core.register_node(node, now_ns=4)
    assert core.workload("second").placements[0].gpu_indexes == (0,)


def test_a_lease_for_work_that_was_placed_here_is_no_external_use():
    node = build_node("a", gpus=2)
    core = build_core(node)
    core.submit(build_request(gpus=1, key="own"), now_ns=2)
    (index,) = core.workload("own").placements[0].gpu_indexes
    # Slurm's prolog takes the lease of a job that Eelgrid placed.
    core.register_node(leased(node, index, "slurm"), now_ns=3)
    core.submit(build_request(gpus=1, key="next"), now_ns=4)
    assert core.workload("next").phase is WorkloadPhase.PLACED
    assert core.state.nodes["a"].externally_used_gpus() == frozenset()


def test_a_lease_explains_a_gpu_that_an_engine_counts_without_a_name():
    node = build_node("a", gpus=4)
    core = build_core(leased(node, 0, "kubernetes"))
    core.update_external_usage("a", ExternalUsage(gpu_count=2), now_ns=2)
    assert core.state.nodes["a"].externally_used_gpus() == {node.gpus[0].uuid, node.gpus[3].uuid}


def test_the_same_twice_is_no_event():
    core = build_core(build_node("a"))
    core.update_external_usage("a", ExternalUsage(cpu_milli=5), now_ns=2)
    assert core.update_external_usage("a", ExternalUsage(cpu_milli=5), now_ns=3).events == ()
    with pytest.raises(NotFound):
        core.update_external_usage("z", ExternalUsage(), now_ns=4)


def test_nothing_comes_to_a_closed_node_and_what_is_there_stays():
    core = build_core(build_node("a"), build_node("b"))
    core.submit(build_request(gpus=1, key="before"), now_ns=2)
    (held,) = nodes_of(core, "before")
    other = "b" if held == "a" else "a"
    core.update_external_usage(held, ExternalUsage(closed="cordoned"), now_ns=3)
    core.submit(build_request(gpus=2, key="after"), now_ns=4)
    assert nodes_of(core, "after") == [other]
    assert nodes_of(core, "before") == [held]
    core.submit(build_request(gpus=1, key="late"), now_ns=5)
    assert core.workload("late").phase is WorkloadPhase.PENDING
    core.update_external_usage(held, ExternalUsage(), now_ns=6)
    assert nodes_of(core, "late") == [held]


def test_work_goes_where_all_its_traits_are():
    core = build_core(build_node("a"), build_node("b"), build_node("c"))
    core.update_external_usage("b", ExternalUsage(traits=("x",)), now_ns=2)
    core.update_external_usage("c", ExternalUsage(traits=("x", "y")), now_ns=3)
    core.submit(build_request(gpus=1, key="both", required_traits=("x", "y")), now_ns=4)
    assert nodes_of(core, "both") == ["c"]
    for number in range(4):
        core.submit(build_request(gpus=1, key=f"x{number}", required_traits=("x",)), now_ns=5 + number)
    held = sorted(name for number in range(3) for name in nodes_of(core, f"x{number}"))
    assert held == ["b", "b", "c"]
    waits = core.workload("x3")
    assert waits.reason.startswith("gpu_count:")
    core.submit(build_request(gpus=1, key="any"), now_ns=9)
    assert nodes_of(core, "any") == ["a"]


def test_work_without_a_node_for_it_says_that_traits_lack():
    core = build_core(build_node("a"), build_node("b"))
    core.submit(build_request(gpus=1, key="w", required_traits=("k8s:zone-b",)), now_ns=2)
    assert core.workload("w").reason.startswith("traits:")
    told = core.explain_workload("w")
    assert told.constraint == "traits"
    assert "All 2 nodes are ruled out by traits" in told.remedy
    assert "node selector, affinity and tolerations" in told.remedy
    core.update_external_usage("b", ExternalUsage(traits=("k8s:zone-b",)), now_ns=3)
    assert nodes_of(core, "w") == ["b"]


def test_a_planner_with_traits_follows_what_changes():
    core = build_core(*(build_node(name) for name in "abcdef"))
    for name in "bdf":
        core.update_external_usage(name, ExternalUsage(traits=("x",)), now_ns=2)
    for number in range(6):
        core.submit(build_request(gpus=1, key=f"w{number}", required_traits=("x",)), now_ns=3 + number)
        again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
        wanted = build_request(gpus=1, key="next", required_traits=("x",))
        mine = core.submit(replace(wanted, dry_run=True), now_ns=50).result
        assert mine == again.submit(replace(wanted, dry_run=True), now_ns=50).result
    assert sorted(name for number in range(6) for name in nodes_of(core, f"w{number}")) == list("bbddff")


def test_what_requires_traits_is_not_moved_by_who_does_not_know_them():
    core = build_core(build_node("a"), build_node("b"))
    core.update_external_usage("a", ExternalUsage(traits=("x",)), now_ns=2)
    core.submit(build_request(gpus=1, key="w", required_traits=("x",)), now_ns=3)
    problem = build_migration_problem(core.survey_moves(RecommendMovesRequest()))
    assert [unit.manner for unit in problem.units] == [STAYS]


def test_a_decision_with_traits_comes_out_the_same_again():
    core = build_core(build_node("a"), build_node("b"))
    core.update_external_usage("b", ExternalUsage(traits=("x",)), now_ns=2)
    before = Checkpoint(core.state.revision, json.loads(json.dumps(core.state.dump())), "")
    step = core.submit(build_request(gpus=1, key="w", required_traits=("x",)), now_ns=3)
    entries = tuple(
        (before.seq + number, JournalEntry(*event_to_plain(event))) for number, event in enumerate(step.events, start=1)
    )
    document = record_decision(JournalHistory(before, entries), step.result.spec, "w", catalogue.load_catalogue())
    assert document["closed"] == ["a"]
    assert replay_decision(json.loads(json.dumps(document))).differences == ()


def test_devices_that_others_hold_by_name_are_taken_for_nothing_else():
    core = build_core(build_node("a", gpus=4))
    core.update_external_usage("a", ExternalUsage(gpu_count=2, gpu_indexes=(0, 2)), now_ns=2)
    core.submit(build_request(gpus=2, key="two"), now_ns=3)
    (placement,) = core.workload("two").placements
    assert placement.gpu_indexes == (1, 3)
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    assert again.state.nodes["a"].others.gpu_indexes == (0, 2)


def test_a_device_counts_once_where_others_are_said_to_hold_what_is_held_here():
    core = build_core(build_node("a", gpus=4))
    core.submit(build_request(gpus=1, key="one"), now_ns=2)
    (index,) = core.workload("one").placements[0].gpu_indexes
    core.update_external_usage("a", ExternalUsage(gpu_count=1, gpu_indexes=(index,)), now_ns=3)
    core.submit(build_request(gpus=3, key="rest"), now_ns=4)
    assert len(core.workload("rest").placements) == 1


def test_nothing_is_placed_on_a_node_before_its_engine_has_reported_what_stands_there():
    core = build_core(joins_closed=True)
    core.submit(build_request(gpus=1, key="waits"), now_ns=1)
    core.register_node(build_node("a"), now_ns=2)
    assert not core.workload("waits").placements
    core.update_external_usage("a", ExternalUsage(gpu_count=1), now_ns=3)
    assert nodes_of(core, "waits") == ["a"]
    core.mark_node_lost("a", now_ns=4)
    core.register_node(build_node("a"), now_ns=5)
    assert not core.state.nodes["a"].others.closed, "what was reported goes on"


def test_what_a_journal_says_of_others_is_reported_again_before_anything_is_placed():
    before = build_core(build_node("a", gpus=4))
    before.update_external_usage("a", ExternalUsage(gpu_count=1), now_ns=2)
    core = Core(ClusterState.load(before.state.dump()), catalogue.load_catalogue(), joins_closed=True)
    step = core.expect_reports(now_ns=3)
    assert [type(event) for event in step.events] == [NodeOccupied]
    assert core.expect_reports(now_ns=4).events == ()
    core.submit(build_request(gpus=1, key="waits"), now_ns=5)
    assert not core.workload("waits").placements
    core.update_external_usage("a", ExternalUsage(gpu_count=4), now_ns=6)
    assert not core.workload("waits").placements
