"""Cordons and drains in the core: what takes no new work, what leaves, what stays and why, and what a restart keeps."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import MoveRefused
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import (
    NodeCordoned,
    NodeUncordoned,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import DrainOutcome, Mobility, Move, ReplicaMove, WorkloadKind, WorkloadPhase

WAITS = DrainTerms()
GANG = WorkloadKind.TRAINING_JOB
SERVICE = WorkloadKind.INFERENCE_SERVICE


def drain(core, *, now_ns=100):
    """Continues drains until nothing is due; returns the events."""
    events = []
    while core.is_drain_due(now_ns):
        events += core.continue_drains(now_ns=now_ns).events
    return drop_quotes(events)


def nodes_of(core, key):
    return [place.node_name for place in core.workload(key).placements]


def place_on(core, name, *requests):
    """Submits work while only this node is open."""
    for other in core.state.nodes:
        if other != name:
            core.cordon_node(other, now_ns=1)
    for request in requests:
        assert core.submit(request, now_ns=2).result.phase is WorkloadPhase.PLACED
    for other in core.state.nodes:
        core.uncordon_node(other, now_ns=3)


def test_a_cordoned_node_takes_no_work_not_even_of_cpus_and_keeps_what_it_holds():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="old"), now_ns=1)
    step = core.cordon_node("a", reason="fan broken", user="ann", now_ns=5)
    assert step.events == (NodeCordoned(time_ns=5, node_name="a", reason="fan broken", user="ann"),)
    assert core.state.nodes["a"].cordon_reason() == "cordoned by ann: fan broken"
    for key, gpus in (("gpu", 1), ("cpu", 0)):
        assert core.submit(build_request(gpus=gpus, key=key), now_ns=6).result.phase is WorkloadPhase.PENDING
    assert nodes_of(core, "old") == ["a"]
    assert drain(core) == []
    lifted = drop_quotes(core.uncordon_node("a", user="ann", now_ns=7).events)
    assert [type(event) for event in lifted] == [NodeUncordoned, WorkloadPlaced, WorkloadPlaced]
    assert core.uncordon_node("a", now_ns=8).events == ()


def test_a_cordoned_gpu_takes_no_work_and_others_of_its_node_do():
    core = build_core(build_node("a"))
    core.cordon_node("a", ("1",), now_ns=1)
    assert core.submit(build_request(gpus=1, key="one"), now_ns=2).result.placements[0].gpu_indexes == (0,)
    assert core.submit(build_request(gpus=1, key="two"), now_ns=2).result.phase is WorkloadPhase.PENDING
    core.uncordon_node("a", ("GPU-a-1",), now_ns=3)
    assert core.workload("two").placements[0].gpu_indexes == (1,)


def test_cordoning_again_changes_the_reason_and_ends_a_drain_but_not_the_time_since_when():
    core = build_core(build_node("a"))
    core.cordon_node("a", reason="fan", drain=WAITS, now_ns=5)
    core.cordon_node("a", reason="fan and disk", user="bob", now_ns=9)
    cordon = core.state.nodes["a"].cordon
    assert (cordon.since_ns, cordon.reason, cordon.user, cordon.drain) == (5, "fan and disk", "bob", None)
    assert core.state.draining == set()


def test_unknown_nodes_and_gpus_are_refused_with_near_names():
    core = build_core(build_node("gpu-17"), build_node("gpu-18"))
    with pytest.raises(NotFound, match=r"did you mean gpu-17"):
        core.cordon_node("gpu17", now_ns=1)
    with pytest.raises(NotFound, match=r"has no GPU '7', its GPUs are 0, 1"):
        core.uncordon_node("gpu-17", ("7",), now_ns=1)


def test_an_operators_cordon_outlives_restart_checkpoint_and_the_agents_return():
    core = build_core(build_node("a"), build_node("b"))
    core.cordon_node("a", ("1",), reason="ecc", user="ann", now_ns=2)
    core.cordon_node("b", drain=DrainTerms(deadline_ns=9, force=True), now_ns=3)
    core.mark_node_lost("a", now_ns=4)
    core.register_node(replace(build_node("a"), generation=2), now_ns=5)
    loaded = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert loaded.digest() == core.state.digest()
    assert loaded.draining == {"b"}
    assert loaded.nodes["a"].gpu_cordons == core.state.nodes["a"].gpu_cordons
    assert loaded.nodes["b"].cordon == core.state.nodes["b"].cordon
    assert loaded.nodes["a"].gpu_cordons["GPU-a-1"].describe() == "cordoned by ann: ecc"


def test_a_lost_node_that_is_cordoned_is_not_forgotten():
    core = build_core(build_node("a"), build_node("b"))
    core.cordon_node("a", now_ns=2)
    for name in ("a", "b"):
        core.mark_node_lost(name, now_ns=3)
    assert core.forget_lost_nodes(("a", "b"), now_ns=4).result == ("b",)


@pytest.mark.parametrize("mobility", [Mobility.UNSPECIFIED, Mobility.MOVABLE, Mobility.RESTARTABLE])
def test_a_drain_moves_what_may_move_and_waits_for_what_is_fixed(mobility):
    core = build_core(build_node("a"), build_node("b"))
    fixed = build_request(gpus=1, key="fixed", mobility=Mobility.FIXED)
    place_on(core, "a", build_request(gpus=1, key="free", mobility=mobility), fixed)
    core.cordon_node("a", drain=WAITS, now_ns=5)
    events = drain(core)
    assert [(type(event), event.workload_id) for event in events] == [(WorkloadMoved, "free")]
    assert (nodes_of(core, "free"), nodes_of(core, "fixed")) == (["b"], ["a"])
    check_invariants(core.state)
    core.cancel("fixed", now_ns=6)
    assert core.state.nodes["a"].assignments == {}
    assert not core.is_drain_due(10**18) or drain(core) == []


def test_what_has_no_room_elsewhere_moves_as_soon_as_there_is():
    core = build_core(build_node("a"), build_node("b", gpus=1))
    place_on(core, "b", build_request(gpus=1, key="holder"))
    place_on(core, "a", build_request(gpus=1, key="job"))
    core.cordon_node("a", drain=WAITS, now_ns=5)
    assert drain(core) == []
    assert not core.is_drain_due(10**18)
    core.cancel("holder", now_ns=6)
    assert [type(event) for event in drain(core)] == [WorkloadMoved]
    assert nodes_of(core, "job") == ["b"]


def test_replicas_of_a_service_leave_one_by_one_and_those_of_a_gang_together():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=3))
    service = build_request(gpus=1, key="chat", replicas=2, kind=SERVICE)
    gang = build_request(gpus=1, key="train", replicas=2, kind=GANG)
    place_on(core, "a", service, gang)
    core.cordon_node("a", drain=WAITS, now_ns=5)
    events = drain(core)
    assert [(event.workload_id, len(event.placements)) for event in events] == [("chat", 1), ("chat", 1)]
    assert (nodes_of(core, "chat"), nodes_of(core, "train")) == (["b", "b"], ["a", "a"])
    core.register_node(build_node("c", gpus=1), now_ns=6)
    assert nodes_of(core, "train") == ["a", "a"]
    moved = drain(core)
    assert [(event.workload_id, len(event.placements)) for event in moved] == [("train", 2)]
    assert core.state.nodes["a"].assignments == {}


def test_work_leaves_a_drained_gpu_for_another_of_the_same_node():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="job", cpu=90, mobility=Mobility.RESTARTABLE), now_ns=1)
    (index,) = core.workload("job").placements[0].gpu_indexes
    core.cordon_node("a", (str(index),), drain=WAITS, now_ns=2)
    # Its 90 CPUs are free for itself only because it stops first.
    assert [type(event) for event in drain(core)] == [WorkloadMoved]
    assert core.workload("job").placements[0].gpu_indexes == (1 - index,)


def test_after_the_grace_work_returns_to_the_queue_in_the_order_of_its_submission():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="first"), now_ns=1)
    core.submit(build_request(gpus=1, key="second"), now_ns=2)
    core.submit(build_request(gpus=1, key="third"), now_ns=3)
    core.cordon_node("a", reason="kernel", user="ann", drain=DrainTerms(deadline_ns=50), now_ns=4)
    assert drain(core, now_ns=49) == []
    events = drain(core, now_ns=50)
    evicted = [event for event in events if isinstance(event, WorkloadEvicted)]
    assert [event.workload_id for event in evicted] == ["first", "second"]
    assert evicted[0].reason == "evicted: node a was drained by ann: kernel"
    assert list(core.state.pending) == ["first", "second", "third"]
    loaded = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert list(loaded.pending) == ["first", "second", "third"]
    core.uncordon_node("a", now_ns=60)
    assert [core.workload(key).phase.name for key in ("first", "second", "third")] == ["PLACED", "PLACED", "PENDING"]


def test_fixed_work_outlives_the_grace_unless_it_is_forced():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="fixed", mobility=Mobility.FIXED), now_ns=1)
    core.cordon_node("a", drain=DrainTerms(deadline_ns=50), now_ns=2)
    assert drain(core, now_ns=60) == []
    (found,) = core.preview_drain("a", (), DrainTerms(deadline_ns=90), now_ns=60)
    assert (found.outcome, found.reason) == (DrainOutcome.STAYS, "it is declared fixed")
    core.cordon_node("a", drain=DrainTerms(deadline_ns=61, force=True), now_ns=61)
    assert [type(event) for event in drain(core, now_ns=61)] == [WorkloadEvicted, WorkloadDeferred]


def test_an_evicted_workload_waits_with_what_was_submitted():
    core = build_core(build_node("a", gpus=4))
    core.submit(build_request(gpus=1, key="job", replicas=2), now_ns=1)
    core.scale("job", 3, now_ns=2)
    core.set_limit("job", 100.0, now_ns=3)
    core.cordon_node("a", drain=DrainTerms(deadline_ns=5), now_ns=4)
    drain(core, now_ns=5)
    job = core.workload("job")
    assert (job.phase, job.spec.replicas, job.placements) == (WorkloadPhase.PENDING, 2, ())
    assert (job.power_limit_w, job.replicas_begun, job.placed_ns) == (None, 0, 0)


def test_a_service_with_replicas_elsewhere_goes_on_with_them_after_the_grace():
    core = build_core(build_node("a", gpus=1), build_node("b", gpus=1))
    core.submit(build_request(gpus=1, key="chat", replicas=2, kind=SERVICE), now_ns=1)
    core.cordon_node("a", drain=DrainTerms(deadline_ns=50), now_ns=2)
    events = drain(core, now_ns=50)
    assert [type(event) for event in events] == [WorkloadScaled]
    assert nodes_of(core, "chat") == ["b"]


def test_nothing_leaves_a_lost_node_where_it_may_still_run():
    core = build_core(build_node("a"), build_node("b"))
    place_on(core, "a", build_request(gpus=1, key="job"))
    core.mark_node_lost("a", now_ns=4)
    core.cordon_node("a", drain=DrainTerms(deadline_ns=5), now_ns=5)
    assert drain(core, now_ns=9) == []
    (found,) = core.preview_drain("a", (), WAITS, now_ns=9)
    assert found.outcome is DrainOutcome.STAYS
    assert "may still run there" in found.reason


def test_what_an_engine_runs_is_left_to_its_own_drain_of_nodes_and_gpus():
    core = build_core(build_node("a"), build_node("b"))
    for name in ("a", "b"):
        core.update_external_usage(name, ExternalUsage(traits=("pods",)), now_ns=1)
    place_on(core, "a", build_request(gpus=1, key="pod-x", required_traits=("pods",)))
    soon = DrainTerms(deadline_ns=5, force=True)
    index = str(core.workload("pod-x").placements[0].gpu_indexes[0])
    for gpus in ((), (index,)):
        (found,) = core.preview_drain("a", gpus, DrainTerms(), now_ns=2)
        assert (found.outcome, "its own drain" in found.reason) == (DrainOutcome.FINISHES, True)
        (found,) = core.preview_drain("a", gpus, soon, now_ns=2)
        assert (found.outcome, "when the grace is over" in found.reason) == (DrainOutcome.REQUEUED, True)
    core.cordon_node("a", drain=soon, now_ns=4)
    assert drain(core, now_ns=9) == []


@pytest.mark.parametrize(
    ("force", "labels", "outcome"),
    [
        (True, {"owner": "Job/j"}, DrainOutcome.REQUEUED),
        (False, {"owner": "Job/j"}, DrainOutcome.FINISHES),
        (True, {}, DrainOutcome.FINISHES),
    ],
)
def test_fixed_work_of_an_engine_goes_at_the_end_of_the_grace_only_if_forced_and_if_it_has_an_owner(
    force, labels, outcome
):
    core = build_core(build_node("a"))
    core.update_external_usage("a", ExternalUsage(traits=("pods",)), now_ns=1)
    request = build_request(gpus=1, key="pod-x", required_traits=("pods",), mobility=Mobility.FIXED, labels=labels)
    place_on(core, "a", request)
    (found,) = core.preview_drain("a", (), DrainTerms(deadline_ns=5, force=force), now_ns=2)
    assert found.outcome is outcome


def test_a_preview_counts_what_moves_before_and_changes_nothing():
    core = build_core(build_node("a"), build_node("b", gpus=1))
    place_on(core, "a", build_request(gpus=1, key="one"), build_request(gpus=1, key="two"))
    before = core.state.digest()
    found = core.preview_drain("a", (), DrainTerms(deadline_ns=500), now_ns=9)
    assert [(one.workload_id, one.outcome, one.node_names) for one in found] == [
        ("one", DrainOutcome.MOVES, ("b",)),
        ("two", DrainOutcome.REQUEUED, ()),
    ]
    assert core.state.digest() == before
    core.cordon_node("a", drain=DrainTerms(deadline_ns=500), now_ns=10)
    assert [event.workload_id for event in drain(core)] == ["one"]


def test_a_drain_goes_on_in_a_core_on_the_recovered_state():
    core = build_core(build_node("a"), build_node("b", gpus=1))
    place_on(core, "a", build_request(gpus=1, key="one"), build_request(gpus=1, key="two"))
    core.cordon_node("a", drain=WAITS, now_ns=5)
    assert [event.workload_id for event in drain(core)] == ["one"]
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    assert drain(again) == []
    again.register_node(build_node("c"), now_ns=6)
    assert [event.workload_id for event in drain(again)] == ["two"]
    assert again.state.nodes["a"].assignments == {}


def test_a_step_is_bounded_and_the_next_one_continues():
    core = build_core(build_node("a", gpus=0, cpu=96), build_node("b", gpus=0, cpu=96))
    place_on(core, "a", *(build_request(gpus=0, cpu=1, key=f"job-{number}") for number in range(40)))
    core.cordon_node("a", drain=WAITS, now_ns=5)
    assert len(drop_quotes(core.continue_drains(now_ns=6).events)) == 32
    assert len(drain(core)) == 8


def test_an_explanation_names_the_uncordon_that_would_place_the_work():
    core = build_core(build_node("a"), build_node("b"))
    core.cordon_node("a", now_ns=1)
    core.cordon_node("b", ("0",), now_ns=1)
    core.submit(build_request(gpus=2, key="pair"), now_ns=2)
    remedy = core.explain_workload("pair").remedy
    assert "eelctl uncordon a" in remedy
    assert "eelctl uncordon b/0" in remedy
    core.uncordon_node("b", ("0",), now_ns=3)
    assert nodes_of(core, "pair") == ["b"]


def test_a_move_onto_a_cordoned_node_is_refused_and_one_that_is_undone_is_not():
    core = build_core(build_node("a"), build_node("b"))
    place_on(core, "a", build_request(gpus=1, key="job"))
    source = core.workload("job").placements[0]
    target = replace(source, node_name="b", gpu_uuids=("GPU-b-0",), gpu_indexes=(0,))
    move = Move(workload_id="job", replicas=(ReplicaMove(source=source, target=target),))
    core.cordon_node("b", ("0",), reason="ecc", now_ns=4)
    with pytest.raises(MoveRefused, match=r"is cordoned: ecc"):
        core.apply_moves((move,), now_ns=5)
    assert core.apply_moves((move,), now_ns=5, is_back=True).result == 1


def test_events_of_cordons_come_back_from_the_journal_as_they_were():
    for event in (
        NodeCordoned(time_ns=1, node_name="a", gpu_uuids=("g",), reason="x", user="u", drain=DrainTerms(force=True)),
        NodeUncordoned(time_ns=2, node_name="a", user="u"),
        WorkloadEvicted(time_ns=3, workload_id="w", reason="evicted: preempted"),
    ):
        kind, body = event_to_plain(event)
        assert event_from_plain(kind, json.loads(json.dumps(body))) == event
